"""Frequencies of rotary position embedding (Su et al. 2021), with the scalings of long contexts.

A scaling extends the context that a checkpoint was trained with. It maps the plain frequencies
f = theta^(−2i/D) to [D/2] frequencies, or to [positions, D/2] if they depend on the position.
`llm.layers.decoder.Rotary` applies the rotations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Frequencies theta^(−2i/D), with an optional scaling.

    With `rotated_dim` only the first dimensions of a head are rotated, as a head of that size.
    `sections` are the numbers of pairs, one after the other, that turn by the position in time, in
    height and in width (M-RoPE, Wang et al. 2024); None: all by one position.
    """

    head_dim: int
    theta: float = 10000.0
    scaling: RotaryScaling | None = None
    rotated_dim: int | None = None
    sections: tuple[int, ...] | None = None

    def rotations(self, num_positions: int) -> Tensor:
        """Return complex64 [num_positions, D/2]: the factor of each pair of a head."""
        size = self.head_dim if self.rotated_dim is None else self.rotated_dim
        if self.scaling is None:
            frequencies, magnitude = plain_frequencies(size, self.theta), 1.0
        else:
            scaling = self.scaling
            frequencies = scaling.frequencies(size, self.theta, num_positions)
            magnitude = scaling.magnitude
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        rotated = torch.polar(torch.full_like(angles, magnitude), angles)
        return F.pad(rotated, (0, (self.head_dim - size) // 2), value=1.0)  # others stay


def plain_frequencies(head_dim: int, theta: float | Tensor) -> Tensor:
    """Return float32 [D/2] radians per position; [n, D/2] for n bases [n, 1]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponents)


class RotaryScaling(ABC):
    """A scaling method; `head_dim` and `theta` are the model's."""

    @abstractmethod
    def frequencies(self, head_dim: int, theta: float, num_positions: int) -> Tensor:
        """Return float32 [D/2] or [num_positions, D/2] radians per position."""

    @property
    def magnitude(self) -> float:
        """Return the factor of rotated queries and keys."""
        return 1.0

    def max_positions(self, trained: int) -> int:
        """Return the maximum length of a sequence, given max_position_embeddings."""
        return trained


@dataclass(frozen=True, slots=True)
class LinearScaling(RotaryScaling):
    """Divides all frequencies by `factor`: positions are interpolated (Chen et al. 2023)."""

    factor: float

    def frequencies(self, head_dim: int, theta: float, num_positions: int) -> Tensor:
        """See `RotaryScaling`."""
        return plain_frequencies(head_dim, theta) / self.factor

    def max_positions(self, trained: int) -> int:
        """See `RotaryScaling`: files keep the length that the model was trained with."""
        return int(trained * self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Scaling(RotaryScaling):
    """Divides slow frequencies by `factor`, keeps fast ones, and blends between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def frequencies(self, head_dim: int, theta: float, num_positions: int) -> Tensor:
        """See `RotaryScaling`."""
        frequencies = plain_frequencies(head_dim, theta)
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / self.factor + keep * frequencies


@dataclass(frozen=True, slots=True)
class DynamicScaling(RotaryScaling):
    """Increases the base with the length beyond `original_max_positions` ("NTK").

    A position is always rotated with the base of a sequence that ends there, so that a token's keys
    do not depend on how its prompt was cut into steps.
    """

    factor: float
    original_max_positions: int

    def frequencies(self, head_dim: int, theta: float, num_positions: int) -> Tensor:
        """See `RotaryScaling`."""
        lengths = torch.arange(1, num_positions + 1, dtype=torch.float64)
        lengths.clamp_(min=self.original_max_positions)
        growth = self.factor * lengths / self.original_max_positions - (self.factor - 1)
        base = theta * growth ** (head_dim / (head_dim - 2))
        return plain_frequencies(head_dim, base.float()[:, None])

    def max_positions(self, trained: int) -> int:
        """See `LinearScaling`."""
        return int(trained * self.factor)


@dataclass(frozen=True, slots=True)
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023): interpolates dimensions that turn less than `beta_slow` times in the
    original context, keeps those above `beta_fast`, with a ramp between; `magnitude` applies to
    all.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def frequencies(self, head_dim: int, theta: float, num_positions: int) -> Tensor:
        """See `RotaryScaling`."""
        low = self._dimension(self.beta_fast, head_dim, theta)
        high = self._dimension(self.beta_slow, head_dim, theta)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        frequencies = plain_frequencies(head_dim, theta)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)

    def _dimension(self, turns: float, head_dim: int, theta: float) -> float:
        """Return the index i, as a fraction, of the pair that turns so often in the original
        context.
        """
        ratio = self.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(theta))

    @property
    def magnitude(self) -> float:
        """See `RotaryScaling`."""
        return self.attention_factor

    def max_positions(self, trained: int) -> int:
        """See `RotaryScaling`."""
        return max(trained, int(self.original_max_positions * self.factor))
