"""NanoCodec's decoder network: levels of each code, then causal stages with ever higher rates.

    K codes of a frame ──▶ levels of each code, in -1 … 1   [K × levels]
        ──▶ convolution (7), then per rate: half snake, transposed convolution with a group for each
            channel, mean of three residual blocks (kernels 3, 7, 11)
        ──▶ half snake, convolution (3), clamp ──▶ samples

All layers are causal and keep their state in Mimi's `Memory`.

Sources: NanoCodec, arXiv 2508.05835; HiFi-GAN, arXiv 2010.05646; finite scalar quantisation, arXiv
2309.15505; snake, arXiv 2006.08195.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.mimi.modules import CausalConv, CausalUpsampling, Memory

ENTRY_KERNEL, EXIT_KERNEL = 7, 3
KERNELS = (3, 7, 11)
DILATIONS = (1, 3, 5)
LEAK = 0.01


@dataclass(frozen=True, slots=True)
class NanoCodecConfig:
    """Sizes of one decoder."""

    num_codebooks: int
    levels: tuple[int, ...]  # of a code
    base_channels: int
    rates: tuple[int, ...]

    @property
    def codebook_size(self) -> int:
        return math.prod(self.levels)

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return math.prod(self.rates)

    def reach(self, first: int) -> int:
        """Return the first frame that affects the sample `first`, counted from frame 0."""
        first -= EXIT_KERNEL - 1
        for rate in reversed(self.rates):
            first -= (max(KERNELS) - 1) * sum(dilation + 1 for dilation in DILATIONS)
            first = first // rate - 1
        return first - (ENTRY_KERNEL - 1)


class HalfSnake(nn.Module):
    """Computes x + sin²(a x) / a for the first half of the channels, a leaky ReLU for the rest."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply to x [B, C, T]."""
        waves, others = x.split([self.alpha.shape[1], x.shape[1] - self.alpha.shape[1]], dim=1)
        waves = waves + torch.sin(self.alpha * waves).square_() / self.alpha
        return torch.cat((waves, F.leaky_relu(others, LEAK)), dim=1)


class ResidualUnit(nn.Module):
    """Twice half snake and convolution, added to the input."""

    def __init__(self, channels: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.first_activation, self.second_activation = HalfSnake(channels), HalfSnake(channels)
        self.first = CausalConv(channels, channels, kernel, dilation)
        self.second = CausalConv(channels, channels, kernel)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        inner = self.first(self.first_activation(x), memory)
        return x + self.second(self.second_activation(inner), memory)


class ResidualBlock(nn.Module):
    """Units of one kernel size and growing dilation, one after the other."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(ResidualUnit(channels, kernel, d) for d in DILATIONS)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        for unit in self.units:
            x = unit(x, memory)
        return x


class Stage(nn.Module):
    """Raises the rate and halves the channels."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        out = channels // 2
        self.activation = HalfSnake(channels)
        self.up = CausalUpsampling(channels, out, rate, groups=out)
        self.blocks = nn.ModuleList(ResidualBlock(out, kernel) for kernel in KERNELS)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        x = self.up(self.activation(x), memory)
        return torch.stack([block(x, memory) for block in self.blocks]).mean(0)


class NanoCodecNetwork(nn.Module):
    """Decodes codes to samples, from the start or from a stream's state."""

    levels: Tensor
    strides: Tensor

    def __init__(self, config: NanoCodecConfig) -> None:
        super().__init__()
        self.config = config
        strides = list(accumulate((1, *config.levels[:-1]), mul))
        self.register_buffer("levels", torch.tensor(config.levels), persistent=False)
        self.register_buffer("strides", torch.tensor(strides), persistent=False)
        dim = config.base_channels
        self.entry = CausalConv(config.num_codebooks * len(config.levels), dim, ENTRY_KERNEL)
        self.stages = nn.ModuleList()
        for rate in config.rates:
            self.stages.append(Stage(dim, rate))
            dim //= 2
        self.activation = HalfSnake(dim)
        self.exit = CausalConv(dim, 1, EXIT_KERNEL)

    def forward(self, codes: Tensor, memory: Memory, skipped: int = 0) -> Tensor:
        """Return samples [B, F * hop] of codes [B, F, K].

        The first `skipped` samples are undefined. States are exact only if none are skipped.
        """
        half = self.levels // 2
        index = codes[..., None] // self.strides % self.levels  # [B, F, K, levels]
        x = ((index - half) / half).flatten(2).transpose(1, 2)
        x = self.entry(x[..., max(self.config.reach(skipped), 0) :], memory)
        for stage in self.stages:
            x = stage(x, memory)
        samples = self.exit(self.activation(x), memory).squeeze(1).clamp(-1, 1)
        return F.pad(samples, (codes.shape[1] * self.config.hop - samples.shape[-1], 0))
