"""`Groups`: a matrix [out, in] of 4 or 8 bits with a scale for each group of consecutive inputs.

A weight is q × scale + minimum, or without minimums q × scale, where q of 4 bits counts as q - 8.
Numbers of 4 bits are stored in pairs, as the kernel reads them (see `kernels.cpu.products`): of 32
consecutive inputs byte i holds the number of input i in its lower half, and i + 16 in its upper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llm.kernels.words import Words

STEP = 16
"""Inputs of a group are a multiple of it, and of twice as many with 4 bits."""

MIDDLE = 8
"""Number that is subtracted from those of 4 bits without minimums."""


@dataclass(frozen=True, slots=True)
class Groups:
    """One matrix; groups have equal sizes, which are powers of two."""

    values: Tensor  # uint8 [out, in / 2] in pairs, or int8 [out, in]
    scales: Tensor  # float32 [out, groups]
    minimums: Tensor | None = None  # the same

    @classmethod
    def pack(
        cls, q: Tensor, scales: Tensor, minimums: Tensor | None, group_of: int
    ) -> Groups | None:
        """Return uint8 or int8 numbers q [out, in] with scales and minimums [out, groups] of
        `group_of` inputs each, the last perhaps of fewer.

        uint8 are from 0 to 15. They are stored as 8 bits if groups are too small for pairs. None
        for still smaller groups, and for scales or minimums that are not finite.
        """
        num_in = q.shape[1]
        common = math.gcd(group_of, num_in)
        size = common & -common  # its largest power of two
        found = [scales.float(), *([] if minimums is None else [minimums.float()])]
        if size < STEP or not all(bool(values.isfinite().all()) for values in found):
            return None
        if size != group_of:
            number = torch.arange(0, num_in, size) // group_of
            found = [values[:, number] for values in found]
        if q.dtype is torch.uint8 and size > STEP:
            q = pack_pairs(q)
        elif q.dtype is torch.uint8:
            q = q.to(torch.int8).sub_(0 if minimums is not None else MIDDLE)
        return cls(*_dense([q, *found]))

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        num_out, width = self.values.shape
        return num_out, width * 2 if self.has_pairs else width

    @property
    def has_pairs(self) -> bool:
        """Whether numbers have 4 bits."""
        return self.values.dtype is torch.uint8

    @property
    def group_size(self) -> int:
        """Number of inputs of a group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.numel() * part.element_size() for part in self._parts)

    @property
    def _parts(self) -> list[Tensor]:
        parts = [self.values, self.scales]
        return parts if self.minimums is None else [*parts, self.minimums]

    def rows(self, index: Tensor | slice) -> Groups:
        """Return these output rows, in that order, in memory of their own."""
        return Groups(*_dense([part[index].clone() for part in self._parts]))

    def columns(self, start: int, stop: int) -> Groups | None:
        """Return these inputs; None if they do not begin and end between groups."""
        size = self.group_size
        if start % size or stop % size:
            return None
        per_value = 2 if self.has_pairs else 1
        values = self.values[:, start // per_value : stop // per_value]
        others = [part[:, start // size : stop // size] for part in self._parts[1:]]
        return Groups(*_dense([values, *others]))

    @classmethod
    def stack(cls, matrices: list[Groups]) -> Groups:
        """Return one matrix with the outputs of all: in 8 bits unless all have 4, in the smallest
        of their groups, with minimums if one has them.
        """
        size = min(matrix.group_size for matrix in matrices)
        if len({matrix.has_pairs for matrix in matrices}) > 1:
            matrices = [matrix.widened(size) for matrix in matrices]
        if any(matrix.minimums is not None for matrix in matrices):
            matrices = [matrix._with_minimums() for matrix in matrices]
        matrices = [matrix._in_groups_of(size) for matrix in matrices]
        parts = zip(*(matrix._parts for matrix in matrices), strict=True)
        return cls(*(torch.cat(part) for part in parts))

    def widened(self, size: int) -> Groups:
        """Return the same matrix in 8 bits and groups of `size`."""
        matrix = self._in_groups_of(size)
        if not self.has_pairs:
            return matrix
        q = unpack_pairs(matrix.values).to(torch.int8)
        return Groups(q.sub_(0 if self.minimums is not None else MIDDLE), *matrix._parts[1:])

    def _with_minimums(self) -> Groups:
        if self.minimums is not None:
            return self
        return Groups(self.values, self.scales, self.scales * (-MIDDLE if self.has_pairs else 0))

    def _in_groups_of(self, size: int) -> Groups:
        count = self.group_size // size
        if count == 1:
            return self
        others = [part.repeat_interleave(count, 1) for part in self._parts[1:]]
        return Groups(self.values, *others)

    def to_words(self, device: torch.device) -> Words:
        """Return the matrix on a GPU, as its kernels read it."""
        values, *others = (part.to(device) for part in self._parts)
        # Numbers of 8 bits are q + 128.
        numbers = unpack_pairs(values) if self.has_pairs else values.view(torch.uint8) ^ 128
        minimums = others[1] if len(others) > 1 else None
        return Words.pack(numbers, others[0], minimums, 4 if self.has_pairs else 8)

    def expand(self) -> Tensor:
        """Return the matrix in float32."""
        q = unpack_pairs(self.values) if self.has_pairs else self.values
        numbers = q.float().view(len(q), self.scales.shape[1], -1)
        if self.minimums is not None:
            return numbers.mul_(self.scales[..., None]).add_(self.minimums[..., None]).flatten(1)
        if self.has_pairs:
            numbers.sub_(MIDDLE)
        return numbers.mul_(self.scales[..., None]).flatten(1)


def group_bytes(shape: tuple[int, int], group_of: int, *, bits: int, has_minimums: bool) -> int:
    """Return the bytes of what `Groups.pack` makes of such a matrix, or of the float32 matrix where
    it makes nothing.
    """
    common = math.gcd(group_of, shape[1])
    size = common & -common
    if size < STEP:
        return 4 * math.prod(shape)
    width = 1 if size == STEP else bits / 8
    return math.ceil(math.prod(shape) * (width + (8 if has_minimums else 4) / size))


def pack_pairs(q: Tensor) -> Tensor:
    """Return numbers below 16 [out, in] in pairs [out, in / 2]; `in` is a multiple of 32."""
    pairs = q.view(len(q), -1, 2, STEP)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def unpack_pairs(values: Tensor) -> Tensor:
    """Return the numbers [out, in] of pairs [out, in / 2]."""
    octets = values.view(len(values), -1, STEP)
    return torch.stack([octets & 15, octets >> 4], dim=2).flatten(1)


def _dense(parts: list[Tensor]) -> list[Tensor]:
    return [part.contiguous() for part in parts]
