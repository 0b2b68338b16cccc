"""Products of any number of rows, with sums in one order: of `InvariantLinear` and large heads.

The matrix is the left operand of the tensor core's instruction, which multiplies 64 of its rows;
only the number of tokens on the right changes. No program sums a part of the inputs: each output is
one chain of sums over all inputs, in order. An instruction adds 16 inputs of two bytes to the sums,
however many are read at once. Float8 operands are summed by `FLOAT8_INPUTS`, which the tensor cores
add with fewer bits, and these sums in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm.kernels.tuning import MANY_OUTPUTS

MIN_ROWS = 16  # minimum number of tokens of a program
FLOAT8_INPUTS = 128
FEW_PROGRAMS = 128  # a smaller number leaves a large GPU idle
ALIGNMENT = 128  # outputs of a program, at most

HEAD_TILES = {  # by the rows of a program: those of its two blocks, and stages
    64: (64, 0, 4),
    96: (64, 32, 4),
    128: (128, 0, 3),
    144: (128, 16, 3),
    160: (128, 32, 3),
    192: (128, 64, 4),
    256: (256, 0, 4),
}
READING_ROWS = 64  # a program reads a tile of the matrix in the time of products of so many rows
TILES_CAPABILITY = (9, 0)  # of the first GPUs whose processors have the memory for these tiles


class Product(NamedTuple):
    """Arguments of a product: out [T, N] = x [T, K] × weight [N, K]ᵀ."""

    x: Tensor
    weight: Tensor
    out: Tensor
    num_rows: int
    num_out: int
    num_in: int
    row_scales: Tensor  # [T] and [N] float32, of float8 operands
    out_scales: Tensor
    out_stride: int  # distance of the rows of out
    needed: Tensor  # int32 [2], see `multiply_others`
    first: int  # of the `length` outputs that are left out
    length: int


def multiply_rows(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    row_scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> None:
    """Write x [T, K] × weight [N, K]ᵀ to out [T, N]; the operands are contiguous. They have one
    number format, and `out` may have a wider one.

    Float8 operands have scales [T] and [N].
    """
    _launch(x, weight, out, row_scales, out_scales)


def multiply_others(
    x: Tensor, weight: Tensor, out: Tensor, common: tuple[int, int], needed: Tensor
) -> None:
    """Do the same for the outputs outside of `common` [start, end), if the range `needed` int32 [2]
    has any. `start` is a multiple of `ALIGNMENT`, and so is `end`, unless it is N.
    """
    _launch(x, weight, out, None, None, common, needed)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    row_scales: Tensor | None,
    out_scales: Tensor | None,
    common: tuple[int, int] = (0, 0),
    needed: Tensor | None = None,
) -> None:
    num_rows, num_in = x.shape
    num_out, (first, end) = len(weight), common
    if num_rows == 0:
        return
    is_float8 = row_scales is not None
    blocks = {"more_rows": 0, **blocks_for(num_rows, num_out)}
    if is_float8:
        blocks["block_in"] = FLOAT8_INPUTS
    elif num_out >= MANY_OUTPUTS and x.itemsize == 2 and has_large_tiles(x.device):
        blocks = head_blocks(num_rows)
    rows = blocks["block_rows"] + blocks["more_rows"]
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_out - (end - first), blocks["block_out"]))
    scales = (x if row_scales is None else row_scales, x if out_scales is None else out_scales)
    sizes = (num_rows, num_out, num_in)
    ids = x if needed is None else needed
    given = Product(x, weight, out, *sizes, *scales, out.stride(0), ids, first, end - first)
    _multiply[grid](given, is_float8=is_float8, is_for_others=needed is not None, **blocks)


def has_large_tiles(device: torch.device) -> bool:
    """Whether a processor of the device has the memory for `HEAD_TILES`; the interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= TILES_CAPABILITY


def blocks_for(num_rows: int, num_out: int) -> dict[str, Any]:
    """Return the parameters that may change with the number of rows: no sum's order depends on
    them.
    """
    rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    if rows <= 32:
        return {"block_rows": rows, "block_out": 64, "block_in": 128, "num_stages": 5}
    if rows == 64 or triton.cdiv(num_rows, 128) * triton.cdiv(num_out, 128) < FEW_PROGRAMS:
        return {"block_rows": 64, "block_out": 64, "block_in": 128, "num_stages": 4}
    return {"block_rows": 128, "block_out": 128, "block_in": 64, "num_stages": 4, "num_warps": 8}


def head_blocks(num_rows: int) -> dict[str, Any]:
    """Return these parameters for `MANY_OUTPUTS` and numbers of two bytes, found on an H200."""
    if num_rows <= 32:
        return {**blocks_for(num_rows, MANY_OUTPUTS), "more_rows": 0, "num_stages": 3}
    size = min(HEAD_TILES, key=lambda size: triton.cdiv(num_rows, size) * (size + READING_ROWS))
    rows, more_rows, stages = HEAD_TILES[size]
    blocks = {"block_rows": rows, "more_rows": more_rows, "block_out": 128, "block_in": 64}
    return {**blocks, "num_stages": stages, "num_warps": 8}


@triton.jit
def _read(lines: tl.tensor, inputs: tl.tensor, is_line: tl.tensor, num_in: tl.tensor) -> tl.tensor:
    mask = is_line[:, None] & (inputs < num_in)[None, :]
    return tl.load(lines[:, None] + inputs[None, :], mask=mask, other=0.0)


@triton.jit
def _add(left: tl.tensor, right: tl.tensor, sums: tl.tensor, is_float8: tl.constexpr) -> tl.tensor:
    if is_float8:
        return tl.dot(left, tl.trans(right), sums, max_num_imprecise_acc=left.shape[1])
    return tl.dot(left, tl.trans(right), sums, input_precision="ieee")


@triton.jit
def _write(
    given: Product, sums: tl.tensor, outs: tl.tensor, rows: tl.tensor, is_float8: tl.constexpr
) -> None:
    is_out, is_row = outs < given.num_out, rows < given.num_rows
    if is_float8:
        out_scales = tl.load(given.out_scales + outs, mask=is_out, other=0.0)
        row_scales = tl.load(given.row_scales + rows, mask=is_row, other=0.0)
        sums = sums * out_scales[:, None] * row_scales[None, :]
    places = rows.to(tl.int64)[:, None] * given.out_stride + outs[None, :]
    tl.store(given.out + places, tl.trans(sums), mask=is_row[:, None] & is_out[None, :])


@triton.jit
def _multiply(
    given: Product,
    block_rows: tl.constexpr,
    more_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    is_float8: tl.constexpr,
    is_for_others: tl.constexpr,
) -> None:
    # Programs that run at the same time share tiles of the matrix.
    first_out = tl.program_id(1) * block_out
    if is_for_others:
        first_needed, end_needed = tl.load(given.needed), tl.load(given.needed + 1)
        if (first_needed >= given.first) & (end_needed <= given.first + given.length):
            return
        first_out += tl.where(first_out < given.first, 0, given.length)
    outs = first_out + tl.arange(0, block_out)
    rows = tl.program_id(0) * (block_rows + more_rows) + tl.arange(0, block_rows)
    num_in = given.num_in
    is_out, is_row = outs < given.num_out, rows < given.num_rows
    matrix = given.weight + outs.to(tl.int64) * num_in
    tokens = given.x + rows.to(tl.int64) * num_in
    sums = tl.zeros([block_out, block_rows], tl.float32)
    if more_rows:  # a second block, for which no tile of the matrix is read again
        others = tl.program_id(0) * (block_rows + more_rows) + block_rows + tl.arange(0, more_rows)
        is_other, other_tokens = others < given.num_rows, given.x + others.to(tl.int64) * num_in
        other_sums = tl.zeros([block_out, more_rows], tl.float32)
    for first in range(0, num_in, block_in):
        inputs = first + tl.arange(0, block_in)
        left = _read(matrix, inputs, is_out, num_in)
        sums = _add(left, _read(tokens, inputs, is_row, num_in), sums, is_float8)
        if more_rows:
            right = _read(other_tokens, inputs, is_other, num_in)
            other_sums = _add(left, right, other_sums, is_float8)
    _write(given, sums, outs, rows, is_float8)
    if more_rows:
        _write(given, other_sums, outs, others, is_float8)
