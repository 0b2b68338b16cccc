"""Parts of matrix-vector kernels: tiles of a weight matrix in registers, and rows of activations.

A tile is `BLOCK_OUT` rows of the matrix with all their inputs, held as a tuple of chunks of
`BLOCK_IN` inputs: every load is issued before the first one is used, and the sums of all chunks are
computed in one place. The order of a row's sum does not depend on other rows.

Float8 matrices have a scale for each row of the matrix, and activations are rounded to float8 as in
`llm.kernels.rounding.quantize_rows`. With `IN_HALF` a thread adds the products of the few chunks in
float16, which holds them, and the rest in float32: two numbers of float8 become float16 in one
instruction.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ROUND_PAIR = tl.constexpr("""{
    .reg .b16 rounded;
    cvt.rn.satfinite.e4m3x2.f32 rounded, $2, $1;
    cvt.rn.f16x2.e4m3x2 $0, rounded;
}""")
ROUND_SCALED_PAIR = tl.constexpr("""{
    .reg .b16 rounded;
    .reg .f32 first, second;
    shl.b32 first, $1, 16;
    and.b32 second, $1, 0xffff0000;
    mul.f32 first, first, $2;
    mul.f32 second, second, $3;
    cvt.rn.satfinite.e4m3x2.f32 rounded, second, first;
    cvt.rn.f16x2.e4m3x2 $0, rounded;
}""")  # of bfloat16


@triton.constexpr_function
def _room_for(num_products: int) -> float:
    """Return the power of two that so many products of float8 are divided by to fit float16."""
    return float(1 << math.ceil(math.log2(448 * 448 / 65_504 * num_products)))


@triton.jit
def load_tile(
    weight: tl.tensor,
    rows: tl.tensor,
    num_out: tl.tensor,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tuple:
    """Load chunks [BLOCK_OUT, BLOCK_IN] of the matrix rows `rows`; 0 beyond the matrix.

    A weight is read once per step, so it is evicted from the cache first.
    """
    chunks: tl.tuple = ()
    starts = weight + rows.to(tl.int64)[:, None] * IN
    for first in tl.static_range(0, IN, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        mask = rows[:, None] < num_out
        if IN % BLOCK_IN != 0:
            mask = mask & (inputs[None, :] < IN)
        chunk = tl.load(
            starts + inputs[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
        )
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def load_tiles(
    weight: tl.tensor,
    tile: tl.tensor,
    num_out: tl.tensor,
    PARTS: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tuple:
    """Load the same tile of each of `PARTS` stacked matrices [num_out, IN]."""
    tiles: tl.tuple = ()
    rows = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    for part in tl.static_range(PARTS):
        start = weight + part * num_out.to(tl.int64) * IN
        tiles = tiles + (load_tile(start, rows, num_out, IN, BLOCK_IN),)
    return tiles


@triton.jit
def load_row(
    x: tl.tensor,
    is_row: tl.tensor,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    WIDENS: tl.constexpr = True,
) -> tl.tuple:
    """Load chunks [BLOCK_IN] of the vector at `x`, in float32 if it `WIDENS`; 0 when it is not a
    row.
    """
    chunks: tl.tuple = ()
    for first in tl.static_range(0, IN, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        chunk = tl.load(x + inputs, mask=is_row & (inputs < IN), other=0.0)
        if WIDENS:
            chunk = chunk.to(tl.float32)
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def load_factors(
    scales: tl.tensor,
    tile: tl.tensor,
    num_out: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
) -> tl.tuple:
    """Load the scales [BLOCK_OUT] of a tile's outputs, of each matrix; 1 without scales."""
    factors: tl.tuple = ()
    rows = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    for part in tl.static_range(PARTS):
        factor = 1.0
        if IS_FLOAT8:
            factor = tl.load(scales + part * num_out + rows, mask=rows < num_out, other=0.0)
        factors = factors + (factor,)
    return factors


@triton.jit
def row_factors(largest: tl.tensor) -> tl.tuple:
    """Return the factor before a row is rounded to float8, and the row's scale, for its absolute
    maximum.
    """
    largest = tl.maximum(largest, 1e-12)
    return tl.math.div_rn(448.0, largest), largest * (1.0 / 448.0)


@triton.jit
def add_and_compare(
    sum_a: tl.tensor, largest_a: tl.tensor, sum_b: tl.tensor, largest_b: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Combine two pairs of a sum and a maximum."""
    return sum_a + sum_b, tl.maximum(largest_a, largest_b)


@triton.jit
def quantize_row(row: tl.tuple) -> tl.tuple:
    """Round the chunks of a row to float8; return them in float32, and the row's scale."""
    largest = tl.abs(row[0])
    for c in tl.static_range(1, len(row)):
        largest = tl.maximum(largest, tl.abs(row[c]))
    inverse, scale = row_factors(tl.max(largest, axis=0))
    chunks: tl.tuple = ()
    for c in tl.static_range(len(row)):
        chunks = chunks + ((row[c] * inverse).to(tl.float8e4nv).to(tl.float32),)
    return chunks, scale


@triton.jit
def _rounded_half(values: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Round values times a factor to float8, and return that in float16.

    The instructions are given, so that each thread rounds its own values before all get them: the
    compiler would pass numbers of fewer bits around, and every thread would convert all it needs.
    """
    if IS_INTERPRETED:
        half = (values.to(tl.float32) * factor).to(tl.float8e4nv).to(tl.float16)
    elif values.dtype == tl.bfloat16:
        factors = tl.full(values.shape, 1.0, tl.float32) * factor
        half = tl.inline_asm_elementwise(
            ROUND_SCALED_PAIR,
            "=r,r,r,r",
            [values, factors],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        scaled = values.to(tl.float32) * factor
        half = tl.inline_asm_elementwise(
            ROUND_PAIR, "=r,r,r", [scaled], dtype=tl.float16, is_pure=True, pack=2
        )
    return half


@triton.jit
def quantize_row_to_half(row: tl.tuple, squares: tl.tensor, HAS_SQUARES: tl.constexpr) -> tl.tuple:
    """Round the chunks of a row to float8; return them in float16, divided by a power of two so
    that it holds sums of their products, and the row's scale. Also return the sum of `squares`.
    """
    FACTOR: tl.constexpr = _room_for(len(row))
    largest = tl.abs(row[0].to(tl.float32))
    for c in tl.static_range(1, len(row)):
        largest = tl.maximum(largest, tl.abs(row[c].to(tl.float32)))
    if HAS_SQUARES:
        squares, largest = tl.reduce((squares, largest), 0, add_and_compare)
    else:
        largest = tl.max(largest, axis=0)
    inverse, scale = row_factors(largest)
    chunks: tl.tuple = ()
    for c in tl.static_range(len(row)):
        chunks = chunks + (_rounded_half(row[c], inverse) * (1.0 / FACTOR),)
    return chunks, scale * FACTOR, squares


@triton.jit
def load_rows(
    x: tl.tensor,
    gain: tl.tensor,
    epsilon: tl.tensor,
    num_rows: tl.tensor,
    IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    IN_HALF: tl.constexpr,
) -> tl.tuple:
    """Load ROWS vectors in chunks, and for each the factor to apply to its products.

    With a gain they are normalised: x / √(Σx² + ε) × gain. The root only scales, so it is computed
    while products are summed. For a float8 matrix x × gain is rounded to float8: the root is in
    the scale.
    """
    WIDENS: tl.constexpr = HAS_GAIN or not (IS_FLOAT8 and IN_HALF)
    rows: tl.tuple = ()
    scales: tl.tuple = ()
    if HAS_GAIN:
        gains = load_row(gain, num_rows > 0, IN, BLOCK_IN)
    for t in tl.static_range(ROWS):
        row = load_row(x + t * IN, num_rows > t, IN, BLOCK_IN, WIDENS)
        scale = 1.0
        squares = 0.0
        if HAS_GAIN:
            squares = row[0] * row[0]
            scaled: tl.tuple = (row[0] * gains[0],)
            for c in tl.static_range(1, len(row)):
                squares += row[c] * row[c]
                scaled = scaled + (row[c] * gains[c],)
            row = scaled
        if IS_FLOAT8 and IN_HALF:
            row, scale, squares = quantize_row_to_half(row, squares, HAS_GAIN)
        else:
            if HAS_GAIN:
                squares = tl.sum(squares, axis=0)
            if IS_FLOAT8:
                row, scale = quantize_row(row)
        if HAS_GAIN:
            scale = scale * tl.rsqrt(squares + epsilon)
        rows = rows + (row,)
        scales = scales + (scale,)
    return rows, scales


@triton.jit
def multiply_tile(tile: tl.tuple, row: tl.tuple) -> tl.tensor:
    """Return float32 [BLOCK_OUT] products of a tile's rows with a vector, whose format is that of
    the sums over chunks.
    """
    products = tile[0].to(row[0].dtype) * row[0][None, :]
    for c in tl.static_range(1, len(tile)):
        products += tile[c].to(row[c].dtype) * row[c][None, :]
    return tl.sum(products.to(tl.float32), axis=1)


@triton.jit
def multiply(tiles: tl.tuple, factors: tl.tuple, row: tl.tuple, scale: tl.tensor) -> tl.tuple:
    """Return the scaled products of each tile with a vector."""
    found: tl.tuple = ()
    for part in tl.static_range(len(tiles)):
        found = found + (multiply_tile(tiles[part], row) * scale * factors[part],)
    return found
