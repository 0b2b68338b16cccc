"""Products with packed matrices for many rows, on tensor cores.

A program expands tiles of the matrix in registers, to the numbers that `Words.expand` rounds to the
format of x, and multiplies one place of the words after another with its inputs. As in
`llm.kernels.invariant` the matrix is the left operand, and no program sums a part of the inputs: a
row's result does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from llm.kernels.invariant import FEW_PROGRAMS, MIN_ROWS
from llm.kernels.words import Words

BLOCK_WORDS = 32  # of a row of the matrix; the order of sums depends on it


def multiply_packed(x: Tensor, weight: Words, out: Tensor) -> None:
    """Write x [T, K] × weight [N, K]ᵀ to out [T, N], both contiguous."""
    num_rows, num_in = x.shape
    num_out = weight.shape[0]
    if num_rows == 0:
        return
    blocks = blocks_for(num_rows, num_out)
    grid = (triton.cdiv(num_out, blocks["block_out"]), triton.cdiv(num_rows, blocks["block_rows"]))
    lows = weight.minimums
    _multiply[grid](
        x,
        (weight.values, weight.scales, x if lows is None else lows),
        out,
        num_rows,
        num_out,
        IN=num_in,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero,
        HAS_MINIMUMS=lows is not None,
        block_words=BLOCK_WORDS,
        **blocks,
    )


def blocks_for(num_rows: int, num_out: int) -> dict[str, Any]:
    """Return the parameters that no sum's order depends on."""
    rows = max(MIN_ROWS, triton.next_power_of_2(num_rows))
    if rows <= 32:
        return {"block_rows": rows, "block_out": 64, "num_stages": 4}
    if rows == 64 or triton.cdiv(num_rows, 128) * triton.cdiv(num_out, 128) < FEW_PROGRAMS:
        return {"block_rows": 64, "block_out": 64, "num_stages": 3}
    return {"block_rows": 128, "block_out": 128, "num_stages": 2, "num_warps": 8}


@triton.jit
def load_by_word(
    parts: tl.tensor,
    outs: tl.tensor,
    units: tl.tensor,
    num_out: tl.tensor,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Load the scales or minimums [outs, 4 × units] of the words of units; 0 beyond the matrix."""
    UNIT: tl.constexpr = 128 // BITS
    # Transposed, so that the thread that loads a unit loads its scale.
    groups = outs.to(tl.int64)[None, :] * (IN // GROUP) + (units * UNIT // GROUP)[:, None]
    groups = tl.max_contiguous(groups, [1, 1])
    mask = (outs < num_out)[None, :] & (units < IN // UNIT)[:, None]
    found = tl.trans(tl.load(parts + groups, mask=mask, other=0.0)).to(tl.float32)
    repeated = tl.broadcast_to(found[:, :, None], (outs.shape[0], units.shape[0], 4))
    return tl.reshape(repeated, (outs.shape[0], units.shape[0] * 4))


@triton.jit
def _multiply(
    x: tl.tensor,
    matrix: tl.tuple,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    IN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    PLACES: tl.constexpr = 32 // BITS
    WIDTH: tl.constexpr = IN // PLACES
    values, scales, minimums = matrix
    outs = tl.program_id(0) * block_out + tl.arange(0, block_out)
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_out, is_row = (outs < num_out)[:, None], (rows < num_rows)[:, None]
    lines, tokens = outs.to(tl.int64)[:, None], x + rows.to(tl.int64)[:, None] * IN
    sums = tl.zeros([block_out, block_rows], tl.float32)
    for first in range(0, WIDTH, block_words):
        places = first + tl.arange(0, block_words)
        is_word = (places < WIDTH)[None, :]
        mask = is_out & is_word
        words = tl.load(values + lines * WIDTH + places[None, :], mask=mask, other=0)
        units = first // 4 + tl.arange(0, block_words // 4)
        scale = load_by_word(scales, outs, units, num_out, IN, BITS, GROUP)
        minimum = scale * -ZERO
        if HAS_MINIMUMS:
            minimum += load_by_word(minimums, outs, units, num_out, IN, BITS, GROUP)
        inputs = places // 4 * (4 * PLACES) + places % 4
        for place in tl.static_range(PLACES):
            numbers = (words >> (BITS * place)) & ((1 << BITS) - 1)
            left = (numbers.to(tl.float32) * scale + minimum).to(x.dtype.element_ty)
            right = tl.load(
                tokens + (inputs + 4 * place)[None, :], mask=is_row & is_word, other=0.0
            )
            sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    targets = rows.to(tl.int64)[:, None] * num_out + outs[None, :]
    tl.store(out + targets, tl.trans(sums), mask=is_row & tl.trans(is_out))
