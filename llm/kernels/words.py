"""`Words`: a matrix of 4 or 8 bits with scales of groups, as the kernels of a GPU read it.

A block of 1,024 bytes holds 16 outputs and 4 units of inputs, 32 in each of 4 bits or 16 of 8. It
is what a warp multiplies with four (8 bits: two) instructions of its tensor cores: lane 4 g + t
reads the words t of all units, of output g from the first half and of g + 8 from the second.

    word t of a unit                  inputs t × 8 .. (8 bits: t × 4 ..) of the unit
    bits of the word                  0  4  8 12 |16 20 24 28
    4 bits: input                     0  2  4  6 | 1  3  5  7
    8 bits: input                     0  .  2  . | 1  .  3  .

So the words' bits 0 to 3 and 16 to 19 belong to two neighbours, after a shift by 4 to the next two
(8 bits: to the upper halves), and so on. Outputs and inputs that fill the last blocks are 0, also
their scales.

Scales are float16 where that is exact. Those of K-quants are products of two factors: a float16 of
all groups of a block and an integer of 8 bits of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OUTPUTS = 16  # of a block
UNITS = 4
UNIT_BITS = 128  # of one output
PLACES = {4: (0, 16, 4, 20, 8, 24, 12, 28), 8: (0, 16, 8, 24)}
"""Lowest bit of the number of each input of a word."""

MOST = 128  # of a factor of 8 bits
FACTOR_BYTES = 4  # of float16 of the outputs g and g + 8
FACTORED_AT_ONCE = 2**22  # scales


@dataclass(frozen=True, slots=True)
class Words:
    """A weight is (u - zero) × scale + minimum, or without minimums (u - zero) × scale, for the
    stored number u of `bits` bits.
    """

    values: Tensor  # int32 [tiles of outputs, blocks, 2 halves, 32 lanes, 4 units]
    # [tiles, blocks, 8, groups of a block, 2]: float16 if exact, else float32; or factors in uint8
    # [tiles, blocks, 8, 4 + 2 × groups]: float16 of two outputs, then 128 + i of each group
    scales: Tensor
    minimums: Tensor | None  # in the same form
    bits: int  # 4 or 8
    shape: tuple[int, int]  # [out, in]

    @classmethod
    def pack(cls, numbers: Tensor, scales: Tensor, minimums: Tensor | None, bits: int) -> Words:
        """Return the matrix of uint8 numbers [out, in] with scales and minimums [out, groups].

        `in` is a multiple of the inputs of a unit, which are at most those of a group.
        """
        num_out, num_in = numbers.shape
        block = UNITS * UNIT_BITS // bits
        missing = (0, -num_in % block, 0, -num_out % OUTPUTS)
        tiled = F.pad(numbers, missing)
        tiled = tiled.view((num_out + missing[3]) // OUTPUTS, 2, 8, -1, UNITS, 4, 32 // bits)
        words = torch.zeros(tiled.shape[:-1], dtype=torch.int32, device=numbers.device)
        for index, place in enumerate(PLACES[bits]):
            words |= tiled[..., index].int() << place
        # [tiles, half, g, blocks, units, t] to [tiles, blocks, half, g, t, units]
        values = words.permute(0, 3, 1, 2, 5, 4).flatten(3, 4).contiguous()
        parts = narrowed([scales] if minimums is None else [scales, minimums])
        others = [_tiled(part, num_in, block) for part in parts]
        if others[0].dtype is torch.float32:
            others = factored(others) or others
        shape = num_out, num_in
        return cls(values, others[0], others[1] if minimums is not None else None, bits, shape)

    @property
    def zero(self) -> int:
        """Number that is subtracted from the stored ones."""
        if self.bits == 4 and self.minimums is not None:
            return 0
        return 1 << (self.bits - 1)

    @property
    def has_factors(self) -> bool:
        """Whether scales and minimums are products."""
        return self.scales.dtype is torch.uint8

    @property
    def groups(self) -> int:
        """Groups of a block."""
        size = self.scales.shape[3]
        return (size - FACTOR_BYTES) // 2 if self.has_factors else size

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = [self.values, self.scales, *([] if self.minimums is None else [self.minimums])]
        return sum(part.nbytes for part in parts)

    def tiles(self, start: int, stop: int) -> Words:
        """Return 16 times so many outputs, without a copy."""
        own = slice(start, stop)
        minimums = None if self.minimums is None else self.minimums[own]
        shape = min(stop * OUTPUTS, self.shape[0]) - start * OUTPUTS, self.shape[1]
        return Words(self.values[own], self.scales[own], minimums, self.bits, shape)

    def expand(self) -> Tensor:
        """Return the matrix in float32."""
        tiles, blocks = self.values.shape[:2]
        words = self.values.view(tiles, blocks, 2, 8, 4, UNITS)
        mask = (1 << self.bits) - 1
        numbers = torch.stack([words >> place & mask for place in PLACES[self.bits]], dim=-1)
        # [tiles, blocks, half, g, t, units, inputs] to [tiles, half, g, blocks, units, t × inputs]
        grouped = numbers.permute(0, 2, 3, 1, 5, 4, 6).flatten(5)
        grouped = grouped.reshape(tiles, 2, 8, blocks, self.groups, -1)
        found = (grouped - self.zero).float().mul_(_by_output(self.scales))
        if self.minimums is not None:
            found += _by_output(self.minimums)
        num_out, num_in = self.shape
        return found.flatten(3).flatten(0, 2)[:num_out, :num_in].contiguous()


def _tiled(values: Tensor, num_in: int, block: int) -> Tensor:
    """Return scales [out, groups] as `Words` holds them. Groups of more than a block are
    repeated.
    """
    group = num_in // values.shape[1]
    if group > block:
        values, group = values.repeat_interleave(group // block, 1), block
    per_block = block // group
    values = F.pad(values, (0, -values.shape[1] % per_block, 0, -len(values) % OUTPUTS))
    tiled = values.view(len(values) // OUTPUTS, 2, 8, -1, per_block)
    return tiled.permute(0, 3, 2, 4, 1).contiguous()


def _by_output(parts: Tensor) -> Tensor:
    """Return scales or minimums in float32 [tiles, 2, 8, blocks, groups, 1]."""
    if parts.dtype is torch.uint8:
        common = parts[..., :FACTOR_BYTES].contiguous().view(torch.float16)
        own = parts[..., FACTOR_BYTES:].unflatten(3, (-1, 2)).float() - MOST
        parts = common[..., None, :].float() * own
    return parts.permute(0, 4, 2, 1, 3)[..., None].float()


def factored(parts: list[Tensor]) -> list[Tensor] | None:
    """Return float32 values [tiles, blocks, 8, groups, 2] as factors; None if they are none."""
    if parts[0].shape[3] == 1:
        return None
    found = []
    for part in parts:
        count = max(1, FACTORED_AT_ONCE // part[0].numel())
        pieces = [_factors(piece) for piece in part.split(count)]
        given = [piece for piece in pieces if piece is not None]
        if len(given) < len(pieces):
            return None
        found.append(torch.cat(given))
    return found


def _factors(values: Tensor) -> Tensor | None:
    """Return the factors of some tiles. The greatest of a block is tried as each multiple."""
    index = values.abs().argmax(3, keepdim=True)
    greatest = values.gather(3, index)
    common = torch.zeros_like(greatest)
    is_open = greatest != 0
    for multiple in (*range(1, MOST), -MOST):
        tried = (greatest / multiple).half().float()
        own = (values / tried).round_()
        is_exact = ((own * tried == values) & (own < MOST)).all(3, keepdim=True)
        common = torch.where(is_open & is_exact, tried, common)
        is_open &= ~is_exact
        if not is_open.any():
            break
    if is_open.any():
        return None
    own = torch.where(common == 0, 0, values / common).round_() + MOST
    return joined(common.squeeze(3), own)


def joined(common: Tensor, own: Tensor) -> Tensor:
    """Return factors [tiles, blocks, 8, 2] and 128 + i [tiles, blocks, 8, groups, 2] in bytes."""
    octets = common.half().contiguous().view(torch.uint8)
    return torch.cat([octets, own.to(torch.uint8).flatten(3)], dim=3)


def narrowed(parts: list[Tensor]) -> list[Tensor]:
    """Return float32 values in float16 if none of them changes."""
    halves = [part.half() for part in parts]
    is_exact = all(
        torch.equal(half.float(), part) for half, part in zip(halves, parts, strict=True)
    )
    return halves if is_exact else parts
