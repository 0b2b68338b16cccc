"""Decoder network of Qwen3-TTS' codec: residual codebooks, a causal transformer, convolutions.

    K codes of 12.5 Hz ──▶ sum of projected vectors ──▶ convolution (3)
        ──▶ transformer, each position attends to the last `sliding_window`
        ──▶ per upsampling ratio: transposed convolution, ConvNeXt block     (50 Hz)
        ──▶ convolution (7), then per rate: snake, transposed convolution, three residual units
        ──▶ snake, convolution (7) ──▶ samples

All layers are causal and keep their state in Mimi's `Memory`, with their `num_kept`.

Sources: ConvNeXt, arXiv 2201.03545; snake with two parameters, BigVGAN, arXiv 2206.04658.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.mimi.modules import (
    CausalConv,
    CausalUpsampling,
    Codebooks,
    Memory,
    Prepared,
    Scale,
    rotary_table,
    rotate,
)

DILATIONS = (1, 3, 9)
FIRST_KERNEL = 3
KERNEL = 7
NO_ZERO = 1e-9  # added to the snake's divisor
WIDENING = 4  # of a ConvNeXt block's inner layer


@dataclass(frozen=True, slots=True)
class Qwen3TTSConfig:
    """Sizes of one decoder."""

    num_codebooks: int
    codebook_size: int
    codebook_dim: int  # of the projected vectors; the codebooks have half of it
    latent_dim: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    sliding_window: int
    norm_eps: float
    upsampling_ratios: tuple[int, ...]
    decoder_dim: int
    rates: tuple[int, ...]

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return math.prod(self.upsampling_ratios) * math.prod(self.rates)

    def convolution_reach(self, first: int) -> int:
        """Return the first frame behind the transformer that affects the sample `first`, counted
        from frame 0.
        """
        side = KERNEL - 1
        first -= side
        for rate in reversed(self.rates):
            first = (first - sum(DILATIONS) * side) // rate - 1
        first -= side
        for ratio in reversed(self.upsampling_ratios):
            first = (first - side) // ratio
        return first

    def receptive_frames(self) -> int:
        """Number of frames before a frame that can change its samples."""
        attended = self.num_layers * (self.sliding_window - 1)
        return attended + FIRST_KERNEL - 1 - self.convolution_reach(0)


class Layer(nn.Module):
    """Pre-norm transformer layer with a gated MLP, and both branches scaled per channel."""

    def __init__(self, config: Qwen3TTSConfig) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.num_heads * config.head_dim
        self.num_heads, self.window = config.num_heads, config.sliding_window
        self.num_kept = 2 * inner * (self.window - 1)
        self.attention_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.query, self.key, self.value = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(inner, dim, bias=False)
        self.attention_scale = Scale(dim)
        self.ff_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.gate, self.up = (
            nn.Linear(dim, config.intermediate_size, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(config.intermediate_size, dim, bias=False)
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
        normed = self.ff_norm(x)
        return self.ff_scale(x, self.down(F.silu(self.gate(normed)) * self.up(normed)))


class Snake(Prepared):
    """Computes x + sin²(e^alpha x) / e^beta for each channel."""

    rates: Tensor
    heights: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        for name in ("rates", "heights"):
            self.register_buffer(name, torch.ones(channels), persistent=False)

    def prepare(self) -> None:
        """Compute e^alpha and 1 / e^beta."""
        self.rates.copy_(self.alpha.exp())
        self.heights.copy_(1 / (self.beta.exp() + NO_ZERO))

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply to x [B, C, T]; the result is written to `out`, if given."""
        if x.is_cuda:
            from decoder.kernels.snake import scaled_snake

            return scaled_snake(x, self.rates, self.heights, out)
        result = self.plain(x)
        return result if out is None else out.copy_(result)

    def plain(self, x: Tensor) -> Tensor:
        """Compute the activation with torch's operations."""
        wave = torch.sin(x * self.rates[:, None]).square_()
        return x + wave.mul_(self.heights[:, None])


class ConvNeXt(nn.Module):
    """Depthwise convolution, norm and two layers, added to the input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(dim, dim, KERNEL, groups=dim)
        self.num_kept = dim * (KERNEL - 1)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.widen = nn.Linear(dim, WIDENING * dim)
        self.narrow = nn.Linear(WIDENING * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Apply to x [B, C, T]."""
        inner = self.norm(self.depthwise(memory.join(x, KERNEL - 1)).transpose(1, 2))
        inner = self.gamma * self.narrow(F.gelu(self.widen(inner)))
        return x + inner.transpose(1, 2)


class Upsampling(nn.Module):
    """A transposed convolution whose columns do not overlap, and a ConvNeXt block."""

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(dim, dim, ratio, ratio)
        self.block = ConvNeXt(dim)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Map x [B, C, T] to [B, C, T * ratio]."""
        return self.block(self.conv(x), memory)


class ResidualUnit(nn.Module):
    """Twice snake and convolution, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.first_snake, self.second_snake = Snake(channels), Snake(channels)
        self.first = CausalConv(channels, channels, KERNEL, dilation)
        self.second = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        return x + self.second(self.second_snake(self.first(x, memory, self.first_snake)))


class Stage(nn.Module):
    """Raises the rate and halves the channels."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        self.snake = Snake(channels)
        self.up = CausalUpsampling(channels, channels // 2, rate)
        self.units = nn.ModuleList(ResidualUnit(channels // 2, d) for d in DILATIONS)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.up(x, memory, self.snake)
        for unit in self.units:
            x = unit(x, memory)
        return x


class Qwen3TTSNetwork(nn.Module):
    """Decodes codes to samples, from the start or from a stream's state."""

    def __init__(self, config: Qwen3TTSConfig) -> None:
        super().__init__()
        self.config = config
        books = (config.codebook_size, config.codebook_dim // 2, config.codebook_dim)
        self.semantic = Codebooks(1, *books)
        self.acoustic = Codebooks(config.num_codebooks - 1, *books)
        latent, dim = config.latent_dim, config.decoder_dim
        self.latent = CausalConv(config.codebook_dim, latent, FIRST_KERNEL)
        self.into = nn.Linear(latent, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.out = nn.Linear(config.hidden_size, latent)
        self.upsampling = nn.ModuleList(Upsampling(latent, r) for r in config.upsampling_ratios)
        self.entry = CausalConv(latent, dim, KERNEL)
        self.stages = nn.ModuleList()
        for rate in config.rates:
            self.stages.append(Stage(dim, rate))
            dim //= 2
        self.snake = Snake(dim)
        self.exit = CausalConv(dim, 1, KERNEL)

    def forward(self, codes: Tensor, memory: Memory, skipped: int = 0) -> Tensor:
        """Return samples [B, F * hop] of codes [B, F, K].

        The first `skipped` samples are undefined. States are exact only if none are skipped.
        """
        x = self.latent(self.semantic(codes[..., :1]) + self.acoustic(codes[..., 1:]), memory)
        x = self.out(self._transform(self.into(x.transpose(1, 2)), memory)).transpose(1, 2)
        x = x[..., max(self.config.convolution_reach(skipped), 0) :]
        for part in (*self.upsampling, self.entry, *self.stages):
            x = part(x, memory)
        samples = self.exit(x, memory, self.snake).squeeze(1).clamp(-1, 1)
        return F.pad(samples, (codes.shape[1] * self.config.hop - samples.shape[-1], 0))

    def _transform(self, x: Tensor, memory: Memory) -> Tensor:
        """Apply the transformer to x [B, T, D], behind the earlier positions in `memory`."""
        config = self.config
        positions, bias = memory.positions(x, 1, config.sliding_window)
        table = rotary_table(positions, config.head_dim)
        for layer in self.layers:
            x = layer(x, bias, table, memory)
        return self.norm(x)
