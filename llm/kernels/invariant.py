"""Products of any number of rows, with sums in one order: of `InvariantLinear` and large heads.

The matrix is the left operand of the tensor core's instruction, which multiplies 64 of its rows;
only the number of tokens on the right changes. No program sums a part of the inputs: each output is
one chain of sums over all inputs, in order. Float8 operands are summed by `FLOAT8_INPUTS`, which
the tensor cores add with fewer bits, and these sums in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MIN_ROWS = 16  # minimum number of tokens of a program
FLOAT8_INPUTS = 128
FEW_PROGRAMS = 128  # a smaller number leaves a large GPU idle


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


def multiply_rows(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    row_scales: Tensor | None = None,
    out_scales: Tensor | None = None,
) -> None:
    """Write x [T, K] × weight [N, K]ᵀ to out [T, N], all contiguous. Operands have one number
    format, and `out` may have a wider one.

    Float8 operands have scales [T] and [N].
    """
    num_rows, num_in = x.shape
    num_out = len(weight)
    if num_rows == 0:
        return
    is_float8 = row_scales is not None
    blocks = blocks_for(num_rows, num_out)
    if is_float8:
        blocks["block_in"] = FLOAT8_INPUTS
    grid = (triton.cdiv(num_rows, blocks["block_rows"]), triton.cdiv(num_out, blocks["block_out"]))
    scales = (x if row_scales is None else row_scales, x if out_scales is None else out_scales)
    given = Product(x, weight, out, num_rows, num_out, num_in, *scales)
    _multiply[grid](given, is_float8=is_float8, **blocks)


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


@triton.jit
def _multiply(
    given: Product,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_in: tl.constexpr,
    is_float8: tl.constexpr,
) -> None:
    # Programs that run at the same time share tiles of the matrix.
    outs = tl.program_id(1) * block_out + tl.arange(0, block_out)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    num_in = given.num_in
    is_out, is_row = outs < given.num_out, rows < given.num_rows
    matrix = given.weight + outs.to(tl.int64)[:, None] * num_in
    tokens = given.x + rows.to(tl.int64)[:, None] * num_in
    sums = tl.zeros([block_out, block_rows], tl.float32)
    for first in range(0, num_in, block_in):
        inputs = first + tl.arange(0, block_in)
        is_in = (inputs < num_in)[None, :]
        left = tl.load(matrix + inputs[None, :], mask=is_out[:, None] & is_in, other=0.0)
        right = tl.load(tokens + inputs[None, :], mask=is_row[:, None] & is_in, other=0.0)
        if is_float8:
            sums = tl.dot(left, tl.trans(right), sums, max_num_imprecise_acc=block_in)
        else:
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    if is_float8:
        out_scales = tl.load(given.out_scales + outs, mask=is_out, other=0.0)
        row_scales = tl.load(given.row_scales + rows, mask=is_row, other=0.0)
        sums = sums * out_scales[:, None] * row_scales[None, :]
    places = rows.to(tl.int64)[:, None] * given.num_out + outs[None, :]
    tl.store(given.out + places, tl.trans(sums), mask=is_row[:, None] & is_out[None, :])
