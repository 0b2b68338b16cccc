"""Rotary position embedding (Su et al. 2021).

Checkpoints pair dimension i of a head with i + D/2. Rows of the query and key weights are reordered
once (`interleaved_rows`) so that pairs are neighbours and a rotation is one complex product;
queries and keys are permuted alike, which keeps their products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm.layers.activation import UNSPLIT_ELEMENTS, row_blocks
from llm.layers.rotary_scaling import RotaryScaling, plain_frequencies


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Frequencies theta^(−2i/D), with an optional scaling."""

    head_dim: int
    theta: float = 10000.0
    scaling: RotaryScaling | None = None

    def rotations(self, num_positions: int) -> Tensor:
        """Return complex64 [num_positions, D/2]: the factor of each pair of a head."""
        if self.scaling is None:
            frequencies, magnitude = plain_frequencies(self.head_dim, self.theta), 1.0
        else:
            scaling = self.scaling
            frequencies = scaling.frequencies(self.head_dim, self.theta, num_positions)
            magnitude = scaling.magnitude
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        return torch.polar(torch.full_like(angles, magnitude), angles)


class Rotary:
    """Rotations of every position: complex64 [positions, 1, D/2]."""

    def __init__(self, config: RotaryConfig, num_positions: int, device: torch.device) -> None:
        self._rotations = config.rotations(num_positions).unsqueeze(1).to(device)

    def at(self, positions: Tensor) -> Tensor:
        """Return rotations [T, 1, D/2] of positions [T]."""
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
    """Return the order of weight rows [H × D] in which the halves of each head alternate."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).reshape(-1)
