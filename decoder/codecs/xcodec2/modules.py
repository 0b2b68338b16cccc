"""The decoder network of XCodec2 and NeuCodec: one FSQ codebook, convolutions, a transformer over
all codes of the window, an inverse short-time Fourier transform.

    code ──▶ levels ──▶ projections ──▶ convolution (7) ──▶ 2 residual blocks (group norm over time)
         ──▶ transformer, bidirectional, with the window's masks ──▶ 2 residual blocks
         ──▶ spectrum of one frame, magnitude and phase ──▶ overlap of 4 frames ──▶ samples

The attention has no positions: the published network rotates queries and keys by the index of their
*head*, which leaves their products unchanged. Therefore nothing is rotated
here, and codes may come from a prompt, a history or a later block.

Sources: XCodec2 in Llasa, arXiv 2502.04128; FSQ, arXiv 2309.15505; spectra as log magnitude and
phase, Vocos, arXiv 2306.00814.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.window_inputs import CallShape, PaddedRows, Span

OVERLAP = 4  # number of spectra that overlap at any sample; n_fft is as many hops
MAX_MAGNITUDE = 100.0
NUM_GROUPS = 32


@dataclass(frozen=True, slots=True)
class Xcodec2Config:
    """Sizes of one decoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rms_norm_eps: float
    input_size: int  # width of the projected codebook vectors
    levels: tuple[int, ...]
    hop: int  # samples per code


class FsqCodebook(nn.Module):
    """Maps codes to their quantised levels, projected."""

    levels: Tensor
    strides: Tensor

    def __init__(self, config: Xcodec2Config) -> None:
        super().__init__()
        strides = list(accumulate((1, *config.levels[:-1]), mul))
        self.register_buffer("levels", torch.tensor(config.levels), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)
        self.projection = nn.Linear(len(config.levels), config.input_size)

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [B, T] to [B, T, input_size]."""
        half = self.levels // 2
        index = codes[..., None] // self.strides % self.levels
        return self.projection((index - half) / half)


class ResidualBlock(nn.Module):
    """Twice group norm over channels and time, SiLU, convolution; added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(NUM_GROUPS, channels, eps=1e-6)
        self.conv_in = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm_out = nn.GroupNorm(NUM_GROUPS, channels, eps=1e-6)
        self.conv_out = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, own: Span | None) -> Tensor:
        """Apply to x [B, C, T]; its padding is undefined."""
        y = self.conv_in(normed_silu(self.norm_in, x, own))
        return x + self.conv_out(normed_silu(self.norm_out, y, own))


def normed_silu(norm: nn.GroupNorm, x: Tensor, own: Span | None) -> Tensor:
    """Apply group norm over a row's own columns and SiLU to x [B, C, T]; zeros in padding."""
    if own is None:
        return F.silu(norm(x))
    mask = own.mask(x.shape[-1])
    groups = x.masked_fill(~mask, 0.0).unflatten(1, (norm.num_groups, -1))
    count = mask.sum(-1)[..., None, None] * groups.shape[2]
    mean = groups.sum((2, 3), keepdim=True) / count
    off = (groups - mean).masked_fill(~mask[:, None], 0.0)
    variance = off.square().sum((2, 3), keepdim=True) / count
    result = (off * (variance + norm.eps).rsqrt()).flatten(1, 2)
    scaled = result * norm.weight[:, None] + norm.bias[:, None]
    return F.silu(scaled).masked_fill(~mask, 0.0)


class Layer(nn.Module):
    """Pre-norm transformer layer: masked attention without positions, SiLU feed-forward."""

    def __init__(self, config: Xcodec2Config) -> None:
        super().__init__()
        dim, inner = config.hidden_size, config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.attention_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.query, self.key, self.value = (nn.Linear(dim, inner, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(inner, dim, bias=False)
        self.ff_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.ff_in = nn.Linear(dim, config.intermediate_size, bias=False)
        self.ff_out = nn.Linear(config.intermediate_size, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply to x [B, T, D]; bias [B, 1, T, T] of the attention, or None without masks."""
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        return x + self.ff_out(F.silu(self.ff_in(self.ff_norm(x))))


class Xcodec2Network(nn.Module):
    """Decodes codes to samples; `FusedNetwork` has other forms of the sums, for a GPU."""

    window: Tensor

    def __init__(self, config: Xcodec2Config) -> None:
        super().__init__()
        self.config = config
        dim, n_fft = config.hidden_size, OVERLAP * config.hop
        self.codebook = FsqCodebook(config)
        self.input = nn.Linear(config.input_size, dim)
        self.embed = nn.Conv1d(dim, dim, 7, padding=3)
        self.before = nn.ModuleList(ResidualBlock(dim) for _ in range(2))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.after = nn.ModuleList(ResidualBlock(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.spectrum = nn.Linear(dim, n_fft + 2)
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)

    def forward(self, rows: PaddedRows) -> Tensor:
        """Return samples [B, num_samples] from column `left` on."""
        x = self._embedded(rows)
        for block in self.before:
            x = block(x, rows.own)
        x, bias = x.transpose(1, 2), rows.attention_bias()
        for layer in self.layers:
            x = layer(x, bias)
        x = x.transpose(1, 2)
        for block in self.after:
            x = block(x, rows.own)
        hop, shape = self.config.hop, rows.shape
        first, last = frames_of(shape, hop)
        own = rows.own.beginning(first) if rows.own else None
        audio = self.synthesize(self.norm(x[..., first:last].transpose(1, 2)), own)
        start = (shape.left - first) * hop
        return audio[:, start : start + shape.num_samples]

    def _embedded(self, rows: PaddedRows) -> Tensor:
        """Return the embedded codes [B, D, T]."""
        x = self.input(self.codebook(rows.codes[..., 0])).transpose(1, 2)
        if rows.own is not None:
            x = x * rows.own.mask(x.shape[-1])
        return self.embed(x)

    def synthesize(self, x: Tensor, own: Span | None) -> Tensor:
        """Map frames [B, F, D] to samples [B, F * hop]: the middle of the overlapping spectra."""
        n_fft, hop = OVERLAP * self.config.hop, self.config.hop
        log_magnitude, phase = self.spectrum(x).float().chunk(2, dim=-1)
        spectra = torch.polar(log_magnitude.exp().clamp(max=MAX_MAGNITUDE), phase)
        pieces = torch.fft.irfft(spectra, n=n_fft) * self.window
        weights = self.window.square().expand(1, x.shape[1], n_fft)
        if own is not None:
            mask = own.mask(x.shape[1]).transpose(1, 2)
            pieces, weights = pieces * mask, weights * mask
        total, weight = _overlap_add(pieces, hop), _overlap_add(weights, hop)
        side = (n_fft - hop) // 2
        size = x.shape[1] * hop
        return total[:, side : side + size] / weight[:, side : side + size].clamp(min=1e-11)


def frames_of(shape: CallShape, hop: int) -> tuple[int, int]:
    """Return the first frame whose spectrum affects the emitted samples, and the one behind the
    last.
    """
    stop = shape.left - -shape.num_samples // hop
    return max(shape.left - OVERLAP // 2, 0), min(stop + OVERLAP // 2, shape.num_frames)


def _overlap_add(pieces: Tensor, hop: int) -> Tensor:
    """Add pieces [B, F, n_fft] that start `hop` apart: [B, (F - 1) * hop + n_fft]."""
    batch, count, size = pieces.shape
    parts = pieces.view(batch, count, size // hop, hop)
    total = pieces.new_zeros(batch, count + size // hop - 1, hop)
    for shift in range(size // hop):
        total[:, shift : shift + count] += parts[:, :, shift]
    return total.flatten(1)
