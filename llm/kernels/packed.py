"""Products with packed matrices (`packed.cu`), on tensor cores.

Numbers of one and two rows are multiplied as they are, as integers: x, times the gain of a norm, is
split into three digits of 8 bits, relative to the power of two of the greatest of its block of
inputs, which tensor cores multiply at once with the matrix's numbers. The integers' sums are exact,
and those of groups are float32. The functions also do what comes before and after, as those of
`llm.kernels.products` and `llm.kernels.projections`.

More rows are bfloat16, and so is each number without its scale, which is exact; sums are float32,
and a result does not depend on the other rows. Many rows are multiplied by BLAS, after a part of
the matrix was written to memory in bfloat16, each number rounded once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels.cuda import CudaKernel, most_shared_bytes
from llm.kernels.tuning import MAX_ROWS
from llm.kernels.words import FACTOR_BYTES, OUTPUTS, UNIT_BITS, UNITS, Words

SOURCE = "packed.cu"
MANY_ROWS = 65  # from here on BLAS multiplies
ROWS_OF_TILE = 8
FEW_ROWS_WARPS = 16
ADDED_WARPS = 20  # of products that are not normed
HALF_BYTES = 512  # of a block
STAGE_BYTES = 96 * 1024  # of blocks in flight, in a program
EXPANDED_BYTES = 24 * 2**20  # of a part of the matrix in bfloat16
MAX_TILES = 16  # of outputs, of a program for few rows
RESERVED_BYTES = 1024  # of a program's shared memory, by CUDA
UNEQUAL_BYTES = 7 * 1024
X_PADDING = 16
END_BYTES = 24
PAIR_OF_128 = 0x43004300  # bfloat16
BYTES_OF_128 = 0x80808080


class _Arguments(ctypes.Structure):
    """`Arguments` of `packed.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "gain", "values", "scales", "lows", "out", "bias", "rotations")
        ),
        *((name, ctypes.c_void_p) for name in ("keys", "kv_values", "slots")),
        *((name, ctypes.c_longlong) for name in ("by_page", "by_offset", "by_head")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_out", "num_in")),
        *((name, ctypes.c_int) for name in ("num_tiles", "num_blocks")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("level", "adds", "is_float")),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "head_size", "page_size")),
        *((name, ctypes.c_uint) for name in ("pair_of_128", "bytes_of_128")),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """Macros of `packed.cu`."""

    bits: int
    groups: int
    wide: bool
    lows: bool
    factors: bool = False
    warps: int = 8
    parts: int = 1
    rows: int = 0
    tiles: int = 0
    outs: int = 1
    stages: int = 1
    refills: bool = False
    heads: bool = False

    def macros(self) -> dict[str, int]:
        """Return the macros by their names in the source."""
        return {field.name.upper(): int(getattr(self, field.name)) for field in fields(self)}

    @property
    def function(self) -> str:
        """Name in the source."""
        return "few_rows" if self.rows else "rows" if self.tiles else "expand"

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block, and of the inputs of many rows, in shared memory."""
        scales = 2 * OUTPUTS * self.groups * (1 + self.wide)
        if self.factors:
            scales = OUTPUTS // 2 * (FACTOR_BYTES + 2 * self.groups)
        block = 2 * HALF_BYTES + scales * (1 + self.lows)
        return self.outs * block + self.tiles * OUTPUTS * self.block

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return UNITS * UNIT_BITS // self.bits

    def shared_bytes(self, num_blocks: int, num_tiles: int = 1) -> int:
        """Bytes of a program's shared memory, with so many tiles of outputs of all parts."""
        slots = self.warps * self.stages * self.slot_bytes
        if not self.rows:
            sums = 4 * self.warps * self.tiles * ROWS_OF_TILE * self.outs * OUTPUTS
            return max(slots, sums)
        digits = 3 * (num_blocks * self.block + X_PADDING) + 4 * num_blocks
        sums = 4 * self.warps * (1 + num_tiles * OUTPUTS)
        ends = END_BYTES * num_tiles // self.parts * OUTPUTS
        of_x = 16 * num_blocks * self.groups * self.lows
        return slots + self.rows * (digits + of_x + sums + ends)


@cache
def _kernel(variant: Variant, device: torch.device) -> CudaKernel:
    return CudaKernel(SOURCE, variant.function, variant.macros(), device)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _variant(weight: Words, **others: Any) -> Variant:
    is_wide, has_lows = weight.scales.dtype is torch.float32, weight.minimums is not None
    others["factors"] = weight.has_factors
    return Variant(weight.bits, weight.groups, is_wide, has_lows, **others)


def _arguments(weight: Words, out: Tensor) -> _Arguments:
    lows = weight.minimums
    return _Arguments(
        values=weight.values.data_ptr(),
        scales=weight.scales.data_ptr(),
        lows=None if lows is None else lows.data_ptr(),
        out=out.data_ptr(),
        num_out=weight.shape[0],
        num_in=weight.shape[1],
        num_tiles=weight.values.shape[0],
        num_blocks=weight.values.shape[1],
        pair_of_128=PAIR_OF_128,
        bytes_of_128=BYTES_OF_128,
    )


def _share(weight: Words, parts: int) -> tuple[int, int]:
    """Return the number of programs for few rows, and of the tiles of outputs of the largest, of
    all parts.
    """
    num_tiles = weight.values.shape[0] // parts
    processors = _processors(weight.values.device)
    programs = min(num_tiles, processors)
    needed = -(-num_tiles * parts // MAX_TILES)
    if needed > programs:  # as many as run at once, or a multiple of them
        programs = -(-needed // (2 * processors)) * 2 * processors
    return programs, -(-num_tiles // programs) * parts


def _multiply_few(
    x: Tensor,
    weight: Words,
    given: _Arguments,
    *,
    parts: int = 1,
    gain: Tensor | None,
    epsilon: float,
    bias: Tensor | None,
    level: int,
    heads: bool = False,
) -> None:
    if len(x) == 0:
        return
    given.x, given.num_rows, given.level = x.data_ptr(), len(x), level
    given.num_out //= parts
    given.num_tiles //= parts
    given.epsilon = epsilon
    given.gain = None if gain is None else gain.data_ptr()
    given.bias = None if bias is None else bias.data_ptr()
    programs, tiles = _share(weight, parts)
    # Programs of two products that follow each other fit on a processor, but not two of one
    # product, of which another processor would then have none: a processor's registers are enough
    # for 36 warps, and the shared memory is halved unequally.
    half = (most_shared_bytes(x.device) + RESERVED_BYTES) // 2 - RESERVED_BYTES
    is_alone, is_normed = programs <= _processors(x.device), gain is not None
    limit, least, warps = half, 0, FEW_ROWS_WARPS
    if is_alone and is_normed:
        limit, least = half + UNEQUAL_BYTES - RESERVED_BYTES, half + RESERVED_BYTES
    elif is_alone:
        limit, warps = half - UNEQUAL_BYTES, ADDED_WARPS
    sizes = _variant(weight, parts=parts, rows=len(x), heads=heads, warps=warps)
    blocks = -(-tiles * given.num_blocks // warps)
    others = sizes.shared_bytes(given.num_blocks, tiles) - warps * sizes.slot_bytes
    stages = max(1, min(blocks, (limit - others) // (warps * sizes.slot_bytes)))
    variant = replace(sizes, stages=stages, refills=stages < blocks)
    shared_bytes = max(least, variant.shared_bytes(given.num_blocks, tiles))
    _kernel(variant, x.device).launch(
        (programs, 1), 32 * variant.warps, shared_bytes, given, is_early=level > 0
    )


def is_few(weight: Words, num_rows: int, *, parts: int = 1) -> bool:
    """Return whether the functions for few rows take so many: a program has their digits in shared
    memory.
    """
    if num_rows > MAX_ROWS:
        return False
    sizes = _variant(weight, parts=parts, rows=max(num_rows, 1), warps=ADDED_WARPS)
    needed = sizes.shared_bytes(weight.values.shape[1], _share(weight, parts)[1])
    return needed <= most_shared_bytes(weight.values.device)


def packed_product(
    x: Tensor,
    weight: Words,
    out: Tensor,
    *,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    bias: Tensor | None = None,
    adds: bool = False,
    level: int = 0,
) -> None:
    """Compute out [T, N] = x [T, K] × weight [N, K]ᵀ (+ bias), or add it to `out`, for one or two
    rows; `out` is bfloat16 or float32.

    With a gain [K], x is normalised first: x / √(Σx² + epsilon) × gain.
    """
    given = _arguments(weight, out)
    given.adds, given.is_float = int(adds), int(out.dtype is torch.float32)
    _multiply_few(x, weight, given, gain=gain, epsilon=epsilon, bias=bias, level=level)


def packed_gated_product(
    x: Tensor, weight: Words, *, gain: Tensor, epsilon: float, level: int = 0
) -> Tensor:
    """Return silu(x gateᵀ) × (x upᵀ) [T, N] for a weight [2 × N, K] of gate and up, N a multiple
    of 16, and one or two rows x, which are normalised.
    """
    out = x.new_empty(len(x), weight.shape[0] // 2)
    given = _arguments(weight, out)
    _multiply_few(x, weight, given, parts=2, gain=gain, epsilon=epsilon, bias=None, level=level)
    return out


def packed_heads(
    x: Tensor,
    weight: Words,
    rotations: Tensor,
    target: KVSlots,
    *,
    gain: Tensor,
    epsilon: float,
    num_heads: int,
    bias: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """Return rotated queries [T, H, D] of one or two rows x [T, K], which are normalised; store
    keys and values, bfloat16, in their slots.

    `weight` [(H + 2 × Hkv) × D, K], `rotations` complex64 [T, 1, D/2].
    """
    _, page_size, num_kv_heads, size = target.keys.shape
    query = x.new_empty(len(x), num_heads, size)
    given = _arguments(weight, query)
    given.rotations = rotations.data_ptr()
    given.keys, given.kv_values = target.keys.data_ptr(), target.values.data_ptr()
    given.slots = target.slots.data_ptr()
    given.by_page, given.by_offset, given.by_head = target.keys.stride()[:3]
    given.heads, given.kv_heads = num_heads, num_kv_heads
    given.head_size, given.page_size = size, page_size
    _multiply_few(x, weight, given, gain=gain, epsilon=epsilon, bias=bias, level=level, heads=True)
    return query


def multiply_packed(x: Tensor, weight: Words, out: Tensor, *, in_one_order: bool = False) -> None:
    """Write x [T, K] × weight [N, K]ᵀ to out [T, N], both contiguous, x bfloat16, `out` bfloat16 or
    float32. `in_one_order`: many rows are multiplied by the kernel of few, too.
    """
    num_rows = len(x)
    if num_rows == 0:
        return
    if num_rows >= MANY_ROWS and not in_one_order:
        _multiply_expanded(x, weight, out)
        return
    tiles = min(4, 1 << (-(-num_rows // ROWS_OF_TILE) - 1).bit_length())
    given = _arguments(weight, out)
    given.x, given.num_rows = x.data_ptr(), num_rows
    given.is_float = int(out.dtype is torch.float32)
    # Several tiles of outputs share the inputs in memory, if enough programs and memory are left.
    most = most_shared_bytes(x.device)
    sizes = _variant(weight, tiles=tiles, outs=tiles)
    while sizes.outs > 1 and (
        given.num_tiles < sizes.outs * _processors(x.device)
        or sizes.shared_bytes(given.num_blocks) > most
    ):
        sizes = replace(sizes, outs=sizes.outs // 2)
    outs = sizes.outs
    blocks = -(-given.num_blocks // sizes.warps)
    room = min(most, STAGE_BYTES if outs == 1 else 2 * STAGE_BYTES)
    stages = min(blocks, 4, room // (sizes.warps * sizes.slot_bytes))
    variant = replace(sizes, stages=max(1, stages))
    grid = (-(-given.num_tiles // outs), -(-num_rows // (tiles * ROWS_OF_TILE)))
    shared_bytes = variant.shared_bytes(given.num_blocks)
    _kernel(variant, x.device).launch(grid, 32 * variant.warps, shared_bytes, given)


def _multiply_expanded(x: Tensor, weight: Words, out: Tensor) -> None:
    """Multiply by BLAS, a part of the outputs after another: the expanded part stays in the
    cache.
    """
    num_in = weight.shape[1]
    step = max(1, EXPANDED_BYTES // (2 * num_in * OUTPUTS))
    matrix = torch.empty(step * OUTPUTS, num_in, dtype=torch.bfloat16, device=x.device)
    for first in range(0, weight.values.shape[0], step):
        part = weight.tiles(first, first + step)
        start, stop = first * OUTPUTS, first * OUTPUTS + part.shape[0]
        expanded = expand(part, matrix[: part.shape[0]]).t()
        target = out[:, start:stop]
        if out.dtype is x.dtype:
            torch.mm(x, expanded, out=target)
        else:  # written in the wider format without rounding in between
            torch.mm(x, expanded, out_dtype=out.dtype, out=target)


def expand(weight: Words, out: Tensor) -> Tensor:
    """Write the matrix to `out` in bfloat16, each number rounded once."""
    variant = _variant(weight)
    given = _arguments(weight, out)
    grid = (-(-given.num_tiles * given.num_blocks // variant.warps), 1)
    _kernel(variant, out.device).launch(grid, 32 * variant.warps, 0, given)
    return out
