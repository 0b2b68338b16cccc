"""Products of up to twice `MAX_SPLIT_ROWS` rows with a matrix, y = x Wᵀ, on tensor cores.

    program    a tile of outputs, and a part of the inputs of all rows ─> its sums
    reader     adds the sums of all parts: `add_normalised`, `llm.kernels.frames.attend_frame`

Such a product takes as long as the matrix and the rows need from the cache to the processors. If
each program had all inputs of a few outputs, most of that were rows: with a part of the inputs and
more outputs it has fewer bytes to read. The parts' sums are added by the kernel that has to read
them anyway. The order of a row's sums does not depend on other rows; that of its norm only on
whether there are more than `WIDE_ROWS`. On Hopper the matrix is read earlier
(`llm.kernels.early_products`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels import early_products
from llm.kernels.blocks import Tiles
from llm.kernels.tuning import MAX_SPLIT_ROWS, WIDE_ROWS


@triton.jit
def _chunk(
    lines: tl.tensor, inputs: tl.tensor, mask: tl.tensor, IN: tl.constexpr, IS_WHOLE: tl.constexpr
) -> tl.tensor:
    """Load some inputs of lines; 0 where there is none."""
    if not IS_WHOLE:
        mask = mask & (inputs < IN)
    return tl.load(lines + inputs, mask=mask, other=0.0)


@triton.jit
def _split_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    row_size: tl.tensor,
    part_size: tl.tensor,
    IN: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GATES: tl.constexpr,
    LEVEL: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Multiply a tile. `PART`: inputs of a program; `IS_WHOLE`: no part has a remainder; `GATES`:
    the matrix has as many rows again, and the result is silu(x gateᵀ) × (x upᵀ).
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    first = tl.program_id(1) * PART
    is_out = outs < num_out
    inside = tl.minimum(outs, num_out - 1).to(tl.int64)
    matrix = weight + inside[:, None] * IN
    second = matrix + num_out.to(tl.int64) * IN
    if LEVEL > 0:
        gdc_wait()
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    tokens = x + rows[:, None] * IN
    sums = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    others = tl.zeros([ROWS, BLOCK_OUT], tl.float32)
    for start in tl.range(0, PART, BLOCK_IN, num_stages=STAGES):
        inputs = first + start + tl.arange(0, BLOCK_IN)[None, :]
        left = _chunk(tokens, inputs, is_row[:, None], IN, IS_WHOLE)
        right = _chunk(matrix, inputs, is_out[:, None], IN, IS_WHOLE)
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        if GATES:
            right = _chunk(second, inputs, is_out[:, None], IN, IS_WHOLE)
            others = tl.dot(left, tl.trans(right), others, input_precision="ieee")
    if LEVEL == 1:
        gdc_launch_dependents()
    if GATES:
        sums = sums / (1.0 + tl.exp(-sums)) * others
    places = out + tl.program_id(1) * part_size + rows[:, None] * row_size + outs[None, :]
    tl.store(places, sums, mask=is_row[:, None] & is_out[None, :])


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    num_out: int,
    tiles: Tiles,
    *,
    gates: bool,
    level: int,
) -> None:
    if early_products.takes(x, weight, num_out, tiles):
        early_products.multiply_early(x, weight, out, num_out, tiles, gates=gates, level=level)
        return
    num_rows, num_in = x.shape
    part = triton.cdiv(triton.cdiv(num_in, tiles.splits), tiles.block_in) * tiles.block_in
    grid = (triton.cdiv(num_out, tiles.block_out), tiles.splits)
    _split_kernel[grid](
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
        IS_WHOLE=part * tiles.splits == num_in,
        GATES=gates,
        LEVEL=level,
        STAGES=tiles.stages,
        num_warps=tiles.num_warps,
        launch_pdl=level > 0,
    )


def multiply_split(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    *,
    out: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """Return float32 sums [S, T, N], whose sum over S is x [T, K] × weight [N, K]ᵀ.

    With `out` [T, N], whose rows may be apart, there is one part, and the result is there.
    """
    num_out = len(weight)
    if out is None:
        out = x.new_empty(tiles.splits, len(x), num_out, dtype=torch.float32)
    _launch(x, weight, out, num_out, tiles, gates=False, level=level)
    return out


def multiply_gated(x: Tensor, weight: Tensor, tiles: Tiles, *, level: int = 0) -> Tensor:
    """Return silu(x gateᵀ) × (x upᵀ) [T, N] for a weight [2 × N, K] of gate and up."""
    num_out = len(weight) // 2
    out = x.new_empty(len(x), num_out)
    _launch(x, weight, out, num_out, tiles, gates=True, level=level)
    return out


@triton.jit
def _add_kernel(
    source: tl.tensor,
    codes: tl.tensor,
    sums: tl.tensor,
    gain: tl.tensor,
    x: tl.tensor,
    out: tl.tensor,
    part_size: tl.tensor,
    epsilon: tl.tensor,
    SPLITS: tl.constexpr,
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
    gains = tl.load(gain + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL > 0:
        gdc_wait()
    line = tl.load(codes + row).to(tl.int64) if GATHERS else row
    values = tl.load(source + line * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        own = sums + split * part_size + row * SIZE + places
        values += tl.load(own, mask=mask, other=0.0)
    values = values.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) + epsilon)
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(x + row * SIZE + places, values, mask=mask)
    tl.store(out + row * SIZE + places, values * scale * gains, mask=mask)


def add_normalised(
    source: Tensor,
    sums: Tensor | None,
    gain: Tensor,
    epsilon: float,
    x: Tensor,
    *,
    codes: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """Write to x [T, K] the rows of `source` [T, K], or those of a table [N, K] that `codes` [T]
    name, plus sums float32 [S, T, K]; return their norm: x / √(Σx² + epsilon) × gain.
    """
    num_rows, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _add_kernel[(num_rows,)](
        source,
        source if codes is None else codes,
        source if sums is None else sums,
        gain,
        x,
        out,
        num_rows * size,
        epsilon,
        SPLITS=0 if sums is None else len(sums),
        GATHERS=codes is not None,
        SIZE=size,
        BLOCK=block,
        LEVEL=level,
        num_warps=min(16, max(1, block // (128 if num_rows > WIDE_ROWS else 256))),
        launch_pdl=level > 0,
    )
    return out
