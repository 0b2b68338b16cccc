"""Products of `split_products` whose matrix is read before the kernels before have ended.

    program    its part of the matrix ─> shared memory
               waits for the kernel before
               the rows ─> shared memory, some chunks at once ─> tensor cores ─> sums

While the kernel before runs, nothing but a matrix can be read, and memory would be idle. The parts,
tiles and order of sums are those of `split_products._split_kernel`, the reference. Triton's own
pipelines copy matrix and rows together; so this is written in Gluon, whose copies are explicit. It
is for Hopper's tensor cores only.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.blocks import Tiles
from llm.kernels.tuning import MAX_SPLIT_ROWS

CAPABILITY = 9  # instructions of these tensor cores exist in no other version
ALIGNMENT = 16  # bytes of a copy


@triton.constexpr_function
def _unread(step: int, slots: int, chunks: int) -> int:
    """Return how many chunks after that of a step were asked for."""
    return min(slots + max(step - 1, 0), chunks) - step - 1


@gluon.jit
def _read_matrix(
    tiles: gl.shared_memory_descriptor,
    matrix: gl.tensor,
    CHUNKS: gl.constexpr,
    BLOCK_IN: gl.constexpr,
) -> None:
    """Ask for all chunks of a matrix."""
    for n in gl.static_range(CHUNKS):
        async_copy.async_copy_global_to_shared(tiles.index(n), matrix + n * BLOCK_IN)


@gluon.jit
def _read_rows(tile: gl.shared_memory_descriptor, places: gl.tensor, mask: gl.tensor) -> None:
    """Ask for a chunk of the rows, 0 where there is none."""
    async_copy.async_copy_global_to_shared(tile, places, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _multiplied(
    left: gl.shared_memory_descriptor,
    right: gl.shared_memory_descriptor,
    second: gl.shared_memory_descriptor,
    sums: gl.tensor,
    others: gl.tensor,
    GATES: gl.constexpr,
) -> gl.tuple:
    """Begin to add the products of a chunk."""
    sums = warpgroup_mma(left, right.permute((1, 0)), sums, is_async=True)
    if GATES:
        others = warpgroup_mma(left, second.permute((1, 0)), others, is_async=True)
    return sums, others


@gluon.jit
def _finished(
    sums: gl.tensor, others: gl.tensor, GATES: gl.constexpr, LATER: gl.constexpr
) -> gl.tuple:
    """Wait for all products but those of the `LATER` last chunks."""
    if GATES:
        sums, others = warpgroup_mma_wait(2 * LATER, deps=[sums, others])
    else:
        sums = warpgroup_mma_wait(LATER, deps=[sums])
    return sums, others


@gluon.jit
def _summed(
    tiles: gl.tuple,
    empty: gl.tensor,
    tokens: gl.tensor,
    is_row: gl.tensor,
    CHUNKS: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    SLOTS: gl.constexpr,
    GATES: gl.constexpr,
) -> gl.tuple:
    """Read the rows chunk by chunk, and return their sums of products with both matrices."""
    lefts, rights, seconds = tiles
    for n in gl.static_range(SLOTS):
        _read_rows(lefts.index(n), tokens + n * BLOCK_IN, is_row)
    sums, others = empty, empty
    for n in gl.static_range(CHUNKS):
        async_copy.wait_group(_unread(n, SLOTS, CHUNKS))
        fence_async_shared()
        gl.thread_barrier()
        left, right, second = lefts.index(n % SLOTS), rights.index(n), seconds.index(n)
        sums, others = _multiplied(left, right, second, sums, others, GATES)
        if n > 0 and SLOTS + n - 1 < CHUNKS:  # into the place of the chunk before, once it is used
            sums, others = _finished(sums, others, GATES, 1)
            gl.thread_barrier()
            slot = lefts.index((n - 1) % SLOTS)
            _read_rows(slot, tokens + (SLOTS + n - 1) * BLOCK_IN, is_row)
    return _finished(sums, others, GATES, 0)


@gluon.jit
def _early_kernel(
    x: gl.tensor,
    weight: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    num_out: gl.tensor,
    row_size: gl.tensor,
    part_size: gl.tensor,
    IN: gl.constexpr,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_OUT: gl.constexpr,
    BLOCK_IN: gl.constexpr,
    SLOTS: gl.constexpr,
    GATES: gl.constexpr,
    LEVEL: gl.constexpr,
) -> None:
    """Multiply a tile with four warps. `SLOTS`: chunks of the rows in shared memory at once; for
    the others see `_split_kernel`.
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    CHUNKS: gl.constexpr = PART // BLOCK_IN
    LANES: gl.constexpr = BLOCK_IN // 8  # that copy a line, 16 bytes each
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_OUT, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    kind: gl.constexpr = x.dtype.element_ty
    lefts = gl.allocate_shared_memory(kind, [SLOTS, ROWS, BLOCK_IN], shared)
    rights = gl.allocate_shared_memory(kind, [CHUNKS, BLOCK_OUT, BLOCK_IN], shared)
    seconds = rights
    inputs = gl.program_id(1) * PART + gl.arange(0, BLOCK_IN, gl.SliceLayout(0, copied))
    outs = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, gl.SliceLayout(1, copied))
    matrix = weight + outs.to(gl.int64)[:, None] * IN + inputs[None, :]
    _read_matrix(rights, matrix, CHUNKS, BLOCK_IN)
    if GATES:
        seconds = gl.allocate_shared_memory(kind, [CHUNKS, BLOCK_OUT, BLOCK_IN], shared)
        _read_matrix(seconds, matrix + num_out.to(gl.int64) * IN, CHUNKS, BLOCK_IN)
    async_copy.commit_group()
    if LEVEL > 0:
        gdc_wait()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    tokens = x + rows[:, None] * IN + inputs[None, :]
    is_row = (rows < num_rows)[:, None]
    tiles = (lefts, rights, seconds)
    empty = gl.zeros([ROWS, BLOCK_OUT], gl.float32, summed)
    sums, others = _summed(tiles, empty, tokens, is_row, CHUNKS, BLOCK_IN, SLOTS, GATES)
    if LEVEL == 1:
        gdc_launch_dependents()
    if GATES:
        sums = sums / (1.0 + gl.exp(-sums)) * others
    lines = gl.arange(0, ROWS, gl.SliceLayout(1, summed))
    columns = gl.program_id(0) * BLOCK_OUT + gl.arange(0, BLOCK_OUT, gl.SliceLayout(0, summed))
    target = out + gl.program_id(1) * part_size + lines[:, None] * row_size + columns[None, :]
    gl.store(target, sums.to(out.dtype.element_ty), mask=(lines < num_rows)[:, None])


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == CAPABILITY


def takes(x: Tensor, weight: Tensor, num_out: int, tiles: Tiles) -> bool:
    """Return whether `multiply_early` computes x [T, K] × weight [N, K]ᵀ with these tiles."""
    num_in = x.shape[1]
    fits = num_out % tiles.block_out == 0 and num_in % (tiles.splits * tiles.block_in) == 0
    is_aligned = not any(part.data_ptr() % ALIGNMENT for part in (x, weight))
    return tiles.slots > 0 and fits and is_aligned and _has_tensor_cores(x.device)


def multiply_early(
    x: Tensor, weight: Tensor, out: Tensor, num_out: int, tiles: Tiles, *, gates: bool, level: int
) -> None:
    """Do what `split_products._launch` does."""
    num_rows, num_in = x.shape
    part = num_in // tiles.splits
    _early_kernel[(num_out // tiles.block_out, tiles.splits)](
        x,
        weight,
        out,
        num_rows,
        num_out,
        out.stride(-2),
        out.stride(0),
        IN=num_in,
        PART=part,
        ROWS=max(MAX_SPLIT_ROWS, triton.next_power_of_2(num_rows)),
        BLOCK_OUT=tiles.block_out,
        BLOCK_IN=tiles.block_in,
        SLOTS=tiles.slots,
        GATES=gates,
        LEVEL=level,
        num_warps=4,
        launch_pdl=level > 0,
    )
