"""Products of 3 to `MAX_SPLIT_ROWS` rows with a matrix of bfloat16, y = x Wᵀ (`split.cu`).

    program         a tile of outputs, and a part of the inputs of all rows ─> its sums
    attend_frame    adds the sums of the parts
    add_product     programs of a cluster add those of each other, and the sums to the residual

A program copies its part of the matrix into shared memory before its predecessor has ended, so that
only the rows are left to read then. If it had all inputs of a few outputs, these would be more than
the matrix: with a part of the inputs and more outputs it has fewer of them. The order of a row's
sums does not depend on other rows.

A norm is computed by the product after it: that product multiplies the residual times the gain, and
divides by the root of the sum of the residual's squares, of which each program of `add_product` has
written a part.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.blocks import Tiles
from llm.kernels.cuda import CudaKernel, most_shared_bytes

SOURCE = "split.cu"
MATRIX_LINES = 16  # of a tensor core's tile
ROWS_OF_TILE = 8
CLUSTER_CAPABILITY = (9, 0)
INPUTS = 8  # of 16 bytes: a matrix has a multiple of them


class _Arguments(ctypes.Structure):
    """`Arguments` of `split.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out", "squares", "residual")),
        *((name, ctypes.c_void_p) for name in ("gain", "new_squares")),
        ("part_size", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_rows", "num_out", "num_in", "row_size")),
        ("epsilon", ctypes.c_float),
        ("level", ctypes.c_int),
    )


class Scaled(NamedTuple):
    """Rows x / √(Σ squares + epsilon), not divided yet."""

    x: Tensor  # bfloat16 [T, K]
    squares: Tensor | None = None  # float32 [T, S]; None: the rows are x
    epsilon: float = 0.0


def room_on(device: torch.device) -> int:
    """Return the shared memory of a program, in bytes; 0 on a device without clusters."""
    if torch.cuda.get_device_capability(device) < CLUSTER_CAPABILITY:
        return 0
    return most_shared_bytes(device)


@cache
def _kernel(macros: tuple[tuple[str, int], ...], device: torch.device) -> CudaKernel:
    return CudaKernel(SOURCE, "split", dict(macros), device)


def _launch(
    rows: Scaled,
    weight: Tensor,
    out: Tensor,
    num_out: int,
    tiles: Tiles,
    given: _Arguments,
    *,
    parts: int = 1,
    adds: bool = False,
) -> None:
    num_rows, num_in = rows.x.shape
    room = max(ROWS_OF_TILE, triton.next_power_of_2(num_rows))
    lines = tiles.block_out * parts // MATRIX_LINES
    groups = min(max(tiles.num_warps // lines, 1), room // ROWS_OF_TILE)
    chunks = tiles.chunks(num_in)
    macros = {
        "ROWS": room,
        "TILES": lines,
        "GROUPS": groups,
        "CHUNK": tiles.block_in,
        "CHUNKS": chunks,
        "STAGES": min(tiles.stages, chunks + 1),
        "PARTS": parts,
        "SQUARES": 0 if rows.squares is None else rows.squares.shape[1],
        "SPLITS": tiles.splits if adds else 0,
    }
    given.x, given.weight, given.out = rows.x.data_ptr(), weight.data_ptr(), out.data_ptr()
    given.num_rows, given.num_out, given.num_in = num_rows, num_out, num_in
    given.part_size, given.row_size = out.stride(0), out.stride(-2)
    given.squares = None if rows.squares is None else rows.squares.data_ptr()
    given.epsilon = rows.epsilon
    _kernel(tuple(macros.items()), weight.device).launch(
        (triton.cdiv(num_out, tiles.block_out), tiles.splits),
        32 * lines * groups,
        tiles.shared_bytes(num_in, room, parts=parts),
        given,
        is_early=given.level > 0,
        cluster=tiles.splits if adds else 1,
    )


def multiply_split(
    rows: Scaled,
    weight: Tensor,
    tiles: Tiles,
    *,
    out: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """Return float32 sums [S, T, N], whose sum over S is rows [T, K] × weight [N, K]ᵀ.

    With `out` [T, N], whose rows may be apart, there is one part, and the result is there.
    """
    num_out = len(weight)
    if out is None:
        out = rows.x.new_empty(tiles.splits, len(rows.x), num_out, dtype=torch.float32)
    _launch(rows, weight, out, num_out, tiles, _Arguments(level=level))
    return out


def multiply_gated(rows: Scaled, weight: Tensor, tiles: Tiles, *, level: int = 0) -> Tensor:
    """Return silu(x gateᵀ) × (x upᵀ) [T, N] for rows x and a weight [2 × N, K] of gate and up."""
    num_out = len(weight) // 2
    out = rows.x.new_empty(len(rows.x), num_out)
    _launch(rows, weight, out, num_out, tiles, _Arguments(level=level), parts=2)
    return out


def add_product(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    residual: Tensor,
    gain: Tensor,
    epsilon: float,
    *,
    level: int = 0,
) -> Scaled:
    """Add x [T, K] × weight [N, K]ᵀ to a residual y [T, N]; return y / √(Σy² + epsilon) × gain for
    a gain float32 [N].
    """
    out = torch.empty_like(residual)
    programs = triton.cdiv(len(weight), tiles.block_out)
    squares = x.new_empty(len(x), programs, dtype=torch.float32)
    given = _Arguments(
        level=level,
        residual=residual.data_ptr(),
        gain=gain.data_ptr(),
        new_squares=squares.data_ptr(),
    )
    _launch(Scaled(x), weight, out, len(weight), tiles, given, adds=True)
    return Scaled(out, squares, epsilon)


@triton.jit
def _norm_kernel(
    source: tl.tensor,
    codes: tl.tensor,
    gain: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    GATHERS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one row."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    gains = tl.load(gain + places, mask=mask, other=0.0)
    if LEVEL > 0:
        gdc_wait()
    line = tl.load(codes + row).to(tl.int64) if GATHERS else row
    values = tl.load(source + line * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) + epsilon)
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(x + row * SIZE + places, values, mask=mask)
    tl.store(out + row * SIZE + places, values * scale * gains, mask=mask)


def normalise_rows(
    source: Tensor,
    gain: Tensor,
    epsilon: float,
    x: Tensor,
    *,
    codes: Tensor | None = None,
    level: int = 0,
) -> Scaled:
    """Write to x [T, K] the rows of `source` [T, K], or those of a table [N, K] that `codes` [T]
    name; return x / √(Σx² + epsilon) × gain for a gain float32 [K].
    """
    num_rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm_kernel[(num_rows,)](
        source,
        source if codes is None else codes,
        gain,
        x,
        out,
        epsilon,
        GATHERS=codes is not None,
        SIZE=size,
        BLOCK=block,
        LEVEL=level,
        num_warps=min(16, max(1, block // 256)),
        launch_pdl=level > 0,
    )
    return Scaled(out)
