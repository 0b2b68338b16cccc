"""`Words`: a matrix of 4 or 8 bits with scales of groups, as the kernels of a GPU read it.

    inputs of a unit       0 .. 3 | 4 .. 7 | ...       (4 bits: 32 inputs; 8 bits: 16)
    its four words    bits 0 .. 3 | 4 .. 7 | ...       (8 bits: 0 .. 7 | 8 .. 15 | ...)

A row is divided into units of 16 bytes, which a thread loads at once. A unit is four 32-bit words,
and word j holds the numbers of the inputs j, j + 4, j + 8 and so on, the first in its lowest bits:
so one place of the four words belongs to four consecutive inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = 4  # of a unit
WORD_BITS = 32
UNIT_BITS = WORDS * WORD_BITS


@dataclass(frozen=True, slots=True)
class Words:
    """A weight is (u - zero) × scale + minimum, or without minimums (u - zero) × scale, for the
    stored number u of `bits` bits.
    """

    values: Tensor  # int32 [out, in × bits / 32]
    scales: Tensor  # [out, groups] in float16 if that is exact, else float32
    minimums: Tensor | None  # the same
    bits: int  # 4 or 8

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor, minimums: Tensor | None, bits: int) -> Words:
        """Return the matrix of uint8 numbers [out, in] with scales and minimums [out, groups].

        `in` is a multiple of the inputs of a unit, which are at most those of a group.
        """
        num_out, num_in = numbers.shape
        places = WORD_BITS // bits
        units = numbers.view(num_out, -1, places, WORDS)
        values = torch.zeros(num_out, num_in // places // WORDS, WORDS, dtype=torch.int32)
        values = values.to(numbers.device)
        for place in range(places):
            values |= units[:, :, place].int() << bits * place
        others = [narrowed(part) for part in (scales, minimums) if part is not None]
        return cls(values.flatten(1), others[0], others[1] if len(others) > 1 else None, bits)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        num_out, width = self.values.shape
        return num_out, width * WORD_BITS // self.bits

    @property
    def group_size(self) -> int:
        """Number of inputs of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def zero(self) -> int:
        """Number that is subtracted from the stored ones."""
        if self.bits == 4 and self.minimums is not None:
            return 0
        return 1 << (self.bits - 1)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = [self.values, self.scales, *([] if self.minimums is None else [self.minimums])]
        return sum(part.nbytes for part in parts)

    def expand(self) -> Tensor:
        """Return the matrix in float32."""
        places = torch.arange(0, WORD_BITS, self.bits, device=self.values.device)
        words = self.values.view(len(self.values), -1, 1, WORDS)
        numbers = (words >> places.int()[:, None]) & ((1 << self.bits) - 1)
        grouped = numbers.flatten(1).view(len(words), self.scales.shape[1], -1)
        found = (grouped - self.zero).float().mul_(self.scales.float()[..., None])
        if self.minimums is not None:
            found += self.minimums.float()[..., None]
        return found.flatten(1)


def narrowed(values: Tensor) -> Tensor:
    """Return float32 values in float16 if no value changes."""
    half = values.half()
    return half if torch.equal(half.float(), values) else values.contiguous()
