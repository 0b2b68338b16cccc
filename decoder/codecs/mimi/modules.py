"""Mimi's decoder network: residual codebooks, a causal transformer, causal convolutions.

    K codes of 12.5 Hz ──▶ sum of projected vectors ──▶ twice the rate (25 Hz)
        ──▶ transformer, each position attends to the last `sliding_window`
        ──▶ convolution (7), then per ratio: ELU, transposed convolution, residual block
        ──▶ ELU, convolution (3) ──▶ samples

All layers are causal, so that each can continue where it stopped: `Memory` has the end of each
layer's earlier input, for streams at different positions. Each layer that uses it says in
`num_kept` how many values that are.

Source: Moshi, arXiv 2410.00037; its convolutions, SEANet and EnCodec, arXiv 2210.13438;
rotary positions, arXiv 2104.09864.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_USAGE = 1e-5
ROTARY_BASE = 10_000.0

Activation = Callable[[Tensor, Tensor], Tensor]
"""Function of x [B, C, T] that writes its values to the second argument, and returns it."""


@dataclass(frozen=True, slots=True)
class MimiConfig:
    """Sizes of one decoder; `upsampling` is positions per frame."""

    hidden_size: int
    num_filters: int
    ratios: tuple[int, ...]
    num_residual_layers: int
    kernel_size: int
    last_kernel_size: int
    residual_kernel_size: int
    dilation_growth: int
    compress: int
    codebook_size: int
    codebook_dim: int
    num_semantic: int
    num_codebooks: int
    upsampling: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    sliding_window: int
    norm_eps: float

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return self.upsampling * math.prod(self.ratios)

    def convolution_reach(self, first: int) -> int:
        """Return the first position that affects the sample `first`, counted from position 0."""
        first -= self.last_kernel_size - 1
        for ratio in reversed(self.ratios):
            dilations = (self.dilation_growth**j for j in range(self.num_residual_layers))
            first -= sum(dilations) * (self.residual_kernel_size - 1)
            first = first // ratio - 1
        return first - (self.kernel_size - 1)

    def receptive_frames(self) -> int:
        """Number of frames before a frame that can change its samples."""
        first = self.convolution_reach(0) - self.num_layers * (self.sliding_window - 1)
        return 1 - first // self.upsampling


class Memory:
    """One pass through the layers of B streams: each layer takes its part of their states, in the
    order of the layers, and overwrites it with its state after the pass.

    `rows` [B, width] are the states, zeros at the start of a stream, and `num_frames` [B] the
    numbers of frames that they hold. Without `rows` all streams begin, and nothing is kept.
    """

    def __init__(self, num_frames: Tensor | None = None, rows: Tensor | None = None) -> None:
        self._num_frames, self._rows = num_frames, rows
        self._place = 0

    def join(self, x: Tensor, size: int, activation: Activation | None = None) -> Tensor:
        """Prepend to x [B, C, T] the last `size` earlier columns: zeros at the start.

        An `activation`, which writes to its second argument, is applied to x on the way.
        """
        if not size and activation is None:
            return x
        shape = *x.shape[:-1], size
        former = x.new_zeros(shape) if self._rows is None else self._part(*shape[1:])
        if activation is None:
            joined = torch.cat((former, x), dim=-1)
        else:
            joined = x.new_empty((*x.shape[:-1], size + x.shape[-1]))
            joined[..., :size] = former
            activation(x, joined[..., size:])
        if self._rows is not None:
            former.copy_(joined[..., joined.shape[-1] - size :])
        return joined

    def grow(self, x: Tensor, size: int) -> Tensor:
        """Prepend to x [B, H, T, D] the last `size` earlier positions: none without states."""
        if not size or self._rows is None:
            return x
        former = self._part(x.shape[1], size, x.shape[3])
        joined = torch.cat((former, x), dim=2)
        former.copy_(joined[:, :, joined.shape[2] - size :])
        return joined

    def positions(self, x: Tensor, per_frame: int, window: int) -> tuple[Tensor, Tensor]:
        """Return the positions [..., T] of x [B, T, D], with so many of them per frame, and the
        attention bias [..., T, S] of the S positions that `grow` returns for `window` - 1.

        A position sees itself and the `window` - 1 positions before it.
        """
        count = x.shape[1]
        own = torch.arange(count, device=x.device)
        past = 0 if self._rows is None else window - 1
        column = torch.arange(past + count, device=x.device)
        distance = past + own[:, None] - column
        seen = (distance >= 0) & (distance < window)
        if self._num_frames is None:
            return own, attention_bias(seen)
        first = (self._num_frames * per_frame)[:, None, None]
        return first + own, attention_bias((seen & (column >= past - first))[:, None])

    def _part(self, *shape: int) -> Tensor:
        """Return the next layer's part of the states, [B, *shape]."""
        assert self._rows is not None
        first = self._place
        self._place += math.prod(shape)
        return self._rows[:, first : self._place].unflatten(1, shape)


def attention_bias(seen: Tensor) -> Tensor:
    """Return 0 where `seen`, bool [..., T, S], and -inf elsewhere, for the scores of attention.

    Row strides are multiples of 8, as kernels require.
    """
    count = seen.shape[-1]
    unseen = F.pad(~seen, (0, -count % 8), value=True)
    bias = torch.zeros(unseen.shape, device=seen.device).masked_fill_(unseen, -math.inf)
    return bias[..., :count]


def state_width(parts: Iterable[nn.Module]) -> int:
    """Return the number of values that the parts of a network keep of a stream."""
    return sum(getattr(part, "num_kept", 0) for part in parts)


class Prepared(nn.Module):
    """A layer that computes once what depends on its weights only."""

    def prepare(self) -> None:
        """Compute it, after the weights have been loaded."""
        raise NotImplementedError


class CausalConv(nn.Module):
    """A convolution over a column and earlier ones."""

    def __init__(self, into: int, out: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(into, out, kernel, dilation=dilation)
        self.past = (kernel - 1) * dilation
        self.num_kept = into * self.past

    def forward(self, x: Tensor, memory: Memory, activation: Activation | None = None) -> Tensor:
        return self.conv(memory.join(x, self.past, activation))


class CausalUpsampling(nn.Module):
    """A transposed convolution of twice its stride: each column overlaps the next one's."""

    def __init__(
        self, into: int, out: int, stride: int, *, groups: int = 1, has_bias: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(into, out, 2 * stride, stride, groups=groups, bias=has_bias)
        self.stride = stride
        self.num_kept = into

    def forward(self, x: Tensor, memory: Memory, activation: Activation | None = None) -> Tensor:
        """Map x [B, C, T] to [B, C', T * stride]."""
        return self.conv(memory.join(x, 1, activation))[..., self.stride : -self.stride]


class ResidualBlock(nn.Module):
    """Twice ELU and convolution through fewer channels, added to the input."""

    def __init__(self, config: MimiConfig, channels: int, dilation: int) -> None:
        super().__init__()
        inner = channels // config.compress
        self.first = CausalConv(channels, inner, config.residual_kernel_size, dilation)
        self.second = CausalConv(inner, channels, 1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        return x + self.second(F.elu(self.first(F.elu(x), memory)), memory)


class Stage(nn.Module):
    """Raises the rate by `ratio` and halves the channels."""

    def __init__(self, config: MimiConfig, channels: int, ratio: int) -> None:
        super().__init__()
        self.up = CausalUpsampling(channels, channels // 2, ratio)
        self.blocks = nn.ModuleList(
            ResidualBlock(config, channels // 2, config.dilation_growth**j)
            for j in range(config.num_residual_layers)
        )

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.up(F.elu(x), memory)
        for block in self.blocks:
            x = block(x, memory)
        return x


class Layer(nn.Module):
    """Pre-norm transformer layer, with both branches scaled per channel."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.num_heads * config.head_dim
        self.num_heads, self.window = config.num_heads, config.sliding_window
        self.num_kept = 2 * inner * (self.window - 1)
        self.attention_norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.query, self.key, self.value = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(inner, dim, bias=False)
        self.attention_scale = Scale(dim)
        self.ff_norm = nn.LayerNorm(dim, eps=config.norm_eps)
        self.ff_in = nn.Linear(dim, config.intermediate_size, bias=False)
        self.ff_out = nn.Linear(config.intermediate_size, dim, bias=False)
        self.ff_scale = Scale(dim)

    def forward(
        self, x: Tensor, bias: Tensor, table: tuple[Tensor, Tensor], memory: Memory
    ) -> Tensor:
        """Apply to x [B, T, D]; bias [..., T, past + T]; cos and sin [..., T, head_dim / 2]."""
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        q, k = rotate(torch.cat((q, k), dim=1), *table).chunk(2, dim=1)
        keys, values = (memory.grow(part, self.window - 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
        x = self.attention_scale(x, self.attention_out(mixed.transpose(1, 2).flatten(2)))
        return self.ff_scale(x, self.ff_out(F.gelu(self.ff_in(self.ff_norm(x)))))


class Scale(nn.Module):
    """Adds a branch, scaled by one factor per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), 0.01))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.addcmul(x, branch, self.scale)


class Codebook(nn.Module):
    """Codebook vectors, stored as running sums and counts of the training."""

    embed_sum: Tensor
    cluster_usage: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embed_sum", torch.randn(size, dim))
        self.register_buffer("cluster_usage", torch.ones(size))

    def forward(self) -> Tensor:
        """Return the vectors [size, dim]."""
        return self.embed_sum / self.cluster_usage.clamp(min=MIN_USAGE)[:, None]


class Codebooks(Prepared):
    """Several residual codebooks of vectors [dim] and their common projection to [out]."""

    vectors: Tensor
    firsts: Tensor

    def __init__(self, count: int, size: int, dim: int, out: int) -> None:
        super().__init__()
        self.books = nn.ModuleList(Codebook(size, dim) for _ in range(count))
        self.projection = nn.Conv1d(dim, out, 1, bias=False) if dim != out else None
        self.register_buffer("vectors", torch.empty(0), persistent=False)
        self.register_buffer("firsts", size * torch.arange(count), persistent=False)

    def prepare(self) -> None:
        """Put the vectors of all codebooks into one table."""
        self.vectors = torch.cat([book() for book in self.books])

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [B, T, K] of K codebooks to [B, out, T]."""
        places = (codes + self.firsts).movedim(-1, 0)
        x = self.vectors[places].sum(0).transpose(1, 2)
        return x if self.projection is None else self.projection(x)


class MimiNetwork(nn.Module):
    """Decodes codes to samples, from the start or from a stream's state."""

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.num_filters * 2 ** len(config.ratios)
        books = (config.codebook_size, config.codebook_dim, config.hidden_size)
        self.semantic = Codebooks(config.num_semantic, *books)
        num_acoustic = config.num_codebooks - config.num_semantic
        self.acoustic = Codebooks(num_acoustic, *books) if num_acoustic else None
        hidden = config.hidden_size
        self.upsample = CausalUpsampling(
            hidden, hidden, config.upsampling, groups=hidden, has_bias=False
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.entry = CausalConv(config.hidden_size, dim, config.kernel_size)
        self.stages = nn.ModuleList()
        for ratio in config.ratios:
            self.stages.append(Stage(config, dim, ratio))
            dim //= 2
        self.exit = CausalConv(dim, 1, config.last_kernel_size)

    def forward(self, codes: Tensor, memory: Memory, skipped: int = 0) -> Tensor:
        """Return samples [B, F * hop] of codes [B, F, K].

        The first `skipped` samples are undefined. States are exact only if none are skipped.
        """
        x = self.upsample(self._vectors(codes), memory)
        x = self._transform(x.transpose(1, 2), memory).transpose(1, 2)
        left_out = max(self.config.convolution_reach(skipped), 0)
        x = self.entry(x[..., left_out:], memory)
        for stage in self.stages:
            x = stage(x, memory)
        samples = self.exit(F.elu(x), memory).squeeze(1)
        return F.pad(samples, (codes.shape[1] * self.config.hop - samples.shape[-1], 0))

    def _vectors(self, codes: Tensor) -> Tensor:
        """Map codes [B, F, K] to [B, hidden_size, F]."""
        num_semantic = self.config.num_semantic
        x = self.semantic(codes[..., :num_semantic])
        return x if self.acoustic is None else x + self.acoustic(codes[..., num_semantic:])

    def _transform(self, x: Tensor, memory: Memory) -> Tensor:
        """Apply the transformer to x [B, T, D], behind the earlier positions in `memory`."""
        config = self.config
        positions, bias = memory.positions(x, config.upsampling, config.sliding_window)
        table = rotary_table(positions, config.head_dim)
        for layer in self.layers:
            x = layer(x, bias, table, memory)
        return x


def rotary_table(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., T, head_dim / 2] for integer positions [..., T]."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.to(torch.float32)[..., None] * ROTARY_BASE ** (-steps / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of the last dimension: x [B, H, T, D], cos and sin [..., T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
