"""Rotary position embedding (Su et al. 2021), with Llama 3's frequency scaling.

Checkpoints pair dimension i of a head with i + D/2. Rows of the query and key weights are
reordered once (`interleaved_rows`) so that pairs are neighbours and a rotation is one complex
product; queries and keys change alike, so their products do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llm.layers.activation import UNSPLIT_ELEMENTS, row_blocks


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Frequencies theta^(−2i/D), all divided by `linear_factor`, or scaled as Llama 3 does."""

    head_dim: int
    theta: float = 10000.0
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None

    def frequencies(self) -> Tensor:
        """float32 [D/2] radians per position."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.llama3 is not None:
            return _scale_llama3(frequencies, self.llama3)
        return frequencies / self.linear_factor


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_positions / wavelengths
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


class Rotary:
    """Rotations of every position: complex64 [positions, 1, D/2]."""

    def __init__(self, config: RotaryConfig, num_positions: int, device: torch.device) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32)
        angles = torch.outer(positions, config.frequencies())
        rotations = torch.polar(torch.ones_like(angles), angles)
        self._rotations = rotations.unsqueeze(1).to(device)

    def at(self, positions: Tensor) -> Tensor:
        """Rotations [T, 1, D/2] of positions [T]."""
        return self._rotations[positions]


def rotate_(x: Tensor, rotations: Tensor) -> None:
    """Rotate [T, H, D] queries or keys in place; pairs are neighbours."""
    num_tokens, num_heads, head_dim = x.shape
    wide = x.float()
    pairs = torch.view_as_complex(wide.view(num_tokens, num_heads, head_dim // 2, 2))
    row_size = num_heads * head_dim // 2
    if num_tokens * row_size <= UNSPLIT_ELEMENTS:
        pairs.mul_(rotations)
    else:
        blocks = zip(row_blocks(pairs, row_size), row_blocks(rotations, row_size), strict=True)
        for block, rotation in blocks:
            block.mul_(rotation)
    if wide is not x:
        x.copy_(wide)


def interleaved_rows(num_heads: int, head_dim: int) -> Tensor:
    """Order of weight rows [H × D] in which the halves of each head alternate."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).reshape(-1)
