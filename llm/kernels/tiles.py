"""Parts of matrix-vector kernels: tiles of a weight matrix in registers, and rows of activations.

A tile is `BLOCK_OUT` rows of the matrix with all their inputs, held as a tuple of chunks of
`BLOCK_IN` inputs: every load is issued before the first one is used, and the sums of all chunks are
computed in one place. The order of a row's sum does not depend on other rows.

Float8 matrices have a scale for each row of the matrix, and activations are rounded to float8 as in
`llm.kernels.rounding.quantize_rows`. Two numbers of float8 become float16 in one instruction, and
float16 holds their products: a thread adds those of the few chunks in float16, the rest in float32.

Packed matrices (`llm.kernels.words`) are read in units of 16 bytes, whose numbers one thread
multiplies without a conversion. A byte b = 16 h + l as the highest bits of a float's mantissa is
1 + b / 256, and its upper half alone 1 + h / 16, so that one shift is enough for two numbers:

    h x + l y = 16 × ((1 + h / 16) × (x - 16 y) + (1 + b / 256) × 16 y - x)

The sums of x by unit are computed once, and a group's scale is applied to the sum of each of its
units.
`PACKED` is the bits of a number (0: the matrix is not packed), the inputs of a group, and whether
groups have minimums.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl


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
def load_packed_tile(
    matrix: tl.tuple,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tuple:
    """Load chunks of `num_rows` rows of a packed matrix: words [BLOCK_OUT, 4 × units], and the
    scales and minimums [BLOCK_OUT, units] of their groups; 0 beyond them.
    """
    UNIT: tl.constexpr = 128 // PACKED[0]
    UNITS: tl.constexpr = IN // UNIT
    BLOCK: tl.constexpr = BLOCK_IN // UNIT
    GROUPS: tl.constexpr = IN // PACKED[1]
    PER_GROUP: tl.constexpr = PACKED[1] // UNIT
    rows = tl.arange(0, BLOCK_OUT)[:, None]
    is_row = rows < num_rows
    first_row = first_row.to(tl.int64)
    start = matrix[0] + first_row * (UNITS * 4)
    scales, minimums = matrix[1] + first_row * GROUPS, matrix[2] + first_row * GROUPS
    chunks: tl.tuple = ()
    for first in tl.static_range(0, UNITS, BLOCK):
        inside = first * 4 + tl.arange(0, BLOCK * 4)
        mask = is_row & (inside < UNITS * 4)[None, :]
        places = rows * (UNITS * 4) + inside[None, :]
        words = tl.load(start + places, mask=mask, other=0, eviction_policy="evict_first")
        # As if they were apart: then the lanes of a warp have different rows, and the sums of
        # units, which follow them through shared memory, need few exchanges between lanes.
        units = first + tl.arange(0, BLOCK)
        mask = is_row & (units < UNITS)[None, :]
        places = tl.max_contiguous(rows * GROUPS + (units // PER_GROUP)[None, :], [1, 1])
        chunk: tl.tuple = (words, tl.load(scales + places, mask=mask, other=0.0))
        if PACKED[2]:
            chunk = chunk + (tl.load(minimums + places, mask=mask, other=0.0),)
        chunks = chunks + (chunk,)
    return chunks


@triton.jit
def load_tiles(
    matrix: tl.tuple,
    tile: tl.tensor,
    num_out: tl.tensor,
    PARTS: tl.constexpr,
    IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PACKED: tl.constexpr,
) -> tl.tuple:
    """Load the same tile of each of `PARTS` stacked matrices [num_out, IN]. `matrix`: values,
    scales, minimums.
    """
    tiles: tl.tuple = ()
    rows = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    for part in tl.static_range(PARTS):
        if PACKED[0] > 0:
            first = tile * BLOCK_OUT
            loaded = load_packed_tile(
                matrix, part * num_out + first, num_out - first, IN, BLOCK_OUT, BLOCK_IN, PACKED
            )
        else:
            start = matrix[0] + part * num_out.to(tl.int64) * IN
            loaded = load_tile(start, rows, num_out, IN, BLOCK_IN)
        tiles = tiles + (loaded,)
    return tiles


@triton.jit
def load_units(
    x: tl.tensor, is_row: tl.tensor, IN: tl.constexpr, BLOCK_IN: tl.constexpr, BITS: tl.constexpr
) -> tl.tuple:
    """Load the vector at `x` in float32 as the packed words hold it: of each chunk and of each
    place n in a word [4 × units], the inputs of the n-th numbers of a unit's words.
    """
    UNIT: tl.constexpr = 128 // BITS
    words = tl.arange(0, BLOCK_IN // UNIT * 4)
    chunks: tl.tuple = ()
    for first in tl.static_range(0, IN, BLOCK_IN):
        starts = first + words // 4 * UNIT
        for place in tl.static_range(32 // BITS):
            inputs = starts + words % 4 + 4 * place
            chunk = tl.load(x + inputs, mask=is_row & (starts < IN), other=0.0)
            chunks = chunks + (chunk.to(tl.float32),)
    return chunks


@triton.jit
def sum_by_unit(words: tl.tensor) -> tl.tensor:
    """Return the sums of each four of the last dimension."""
    if len(words.shape) == 1:
        unit: tl.tensor = tl.reshape(words, (words.shape[0] // 4, 4))
    else:
        unit = tl.reshape(words, (words.shape[0], words.shape[1] // 4, 4))
    return tl.sum(unit, axis=len(words.shape))


@triton.jit
def paired_units(row: tl.tuple, BITS: tl.constexpr) -> tl.tuple:
    """Return what the numbers of `numbers_at` are multiplied with, for a vector of `load_units`,
    and for each chunk the sums [units] of the vector, and of the ones in those numbers.
    """
    PLACES: tl.constexpr = 32 // BITS
    inputs: tl.tuple = ()
    sums: tl.tuple = ()
    for c in tl.static_range(len(row) // PLACES):
        total = row[c * PLACES]
        ones = row[c * PLACES + 8 // BITS - 1]
        for place in tl.static_range(1, PLACES):
            total += row[c * PLACES + place]
        for place in tl.static_range(0, PLACES, 8 // BITS):
            low = row[c * PLACES + place]
            if BITS == 4:
                low = low * 16.0
                high = row[c * PLACES + place + 1]
                inputs = inputs + (low, high - low)
            else:
                high = low
                inputs = inputs + (low,)
            if place > 0:
                ones += high
        sums = sums + ((sum_by_unit(total), sum_by_unit(ones)),)
    return inputs, sums


@triton.jit
def load_row(x: tl.tensor, is_row: tl.tensor, IN: tl.constexpr, BLOCK_IN: tl.constexpr) -> tl.tuple:
    """Load float32 chunks [BLOCK_IN] of the vector at `x`; 0 when it is not a row."""
    chunks: tl.tuple = ()
    for first in tl.static_range(0, IN, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        chunk = tl.load(x + inputs, mask=is_row & (inputs < IN), other=0.0)
        chunks = chunks + (chunk.to(tl.float32),)
    return chunks


@triton.jit
def load_inputs(
    x: tl.tensor, is_row: tl.tensor, IN: tl.constexpr, BLOCK_IN: tl.constexpr, PACKED: tl.constexpr
) -> tl.tuple:
    """Load a vector for a matrix of the format."""
    if PACKED[0] > 0:
        chunks = load_units(x, is_row, IN, BLOCK_IN, PACKED[0])
    else:
        chunks = load_row(x, is_row, IN, BLOCK_IN)
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
def quantize_row(row: tl.tuple, squares: tl.tensor, HAS_SQUARES: tl.constexpr) -> tl.tuple:
    """Round the chunks of a row to float8; return them in float16, divided by a power of two so
    that it holds sums of their products, and the row's scale. Also return the sum of `squares`.
    """
    FACTOR: tl.constexpr = _room_for(len(row))
    largest = tl.abs(row[0])
    for c in tl.static_range(1, len(row)):
        largest = tl.maximum(largest, tl.abs(row[c]))
    if HAS_SQUARES:
        squares, largest = tl.reduce((squares, largest), 0, add_and_compare)
    else:
        largest = tl.max(largest, axis=0)
    inverse, scale = row_factors(largest)
    chunks: tl.tuple = ()
    for c in tl.static_range(len(row)):
        rounded = (row[c] * inverse).to(tl.float8e4nv).to(tl.float16)
        chunks = chunks + (rounded * (1.0 / FACTOR),)
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
    PACKED: tl.constexpr,
) -> tl.tuple:
    """Load ROWS vectors in chunks, and for each the factor to apply to its products.

    With a gain they are normalised: x / √(Σx² + ε) × gain. The root only scales, so it is computed
    while products are summed. For a float8 matrix x × gain is rounded to float8: the root is in
    the scale. For a packed one a vector is that of `load_units` with its sums.
    """
    rows: tl.tuple = ()
    scales: tl.tuple = ()
    if HAS_GAIN:
        gains = load_inputs(gain, num_rows > 0, IN, BLOCK_IN, PACKED)
    for t in tl.static_range(ROWS):
        row = load_inputs(x + t * IN, num_rows > t, IN, BLOCK_IN, PACKED)
        scale = 1.0
        squares = 0.0
        if HAS_GAIN:
            squares = row[0] * row[0]
            scaled: tl.tuple = (row[0] * gains[0],)
            for c in tl.static_range(1, len(row)):
                squares += row[c] * row[c]
                scaled = scaled + (row[c] * gains[c],)
            row = scaled
        if IS_FLOAT8:
            row, scale, squares = quantize_row(row, squares, HAS_GAIN)
        elif HAS_GAIN:
            squares = tl.sum(squares)
        if HAS_GAIN:
            scale = scale * tl.rsqrt(squares + epsilon)
        if PACKED[0] > 0:
            row = paired_units(row, PACKED[0])
            scale = scale * (1 << PACKED[0])
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
def numbers_at(
    words: tl.tensor, one: tl.tensor, place: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Return 1 + b / 256 for the byte b that begins at a place of each word, and 1 + h / 16 for its
    upper half h at the next place. `one`: the bits of 1.0.
    """
    down: tl.constexpr = BITS * place // 8 * 8 - 15  # the mantissa's highest bits are 15 to 22
    moved = words >> down if down > 0 else words << -down
    MASK: tl.constexpr = 0x7F8000 if BITS * place % 8 == 0 else 0x780000
    bits = (moved & MASK) | one
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def multiply_packed_tile(
    tile: tl.tuple, row: tl.tuple, one: tl.tensor, PACKED: tl.constexpr
) -> tl.tensor:
    """Return float32 [BLOCK_OUT] products of a tile's rows with a vector, over 2^BITS."""
    BITS: tl.constexpr = PACKED[0]
    PLACES: tl.constexpr = 32 // BITS
    # Without minimums the number 8 of 4 bits is zero; of 8 bits it is always 128.
    ZERO: tl.constexpr = 0.0 if BITS == 4 and PACKED[2] else 0.5
    inputs, sums = row
    found: tl.tuple = ()
    for c in tl.static_range(len(tile)):
        words = tile[c][0]
        products = numbers_at(words, one, 0, BITS) * inputs[c * PLACES][None, :]
        for place in tl.static_range(1, PLACES):
            numbers = numbers_at(words, one, place, BITS)
            products += numbers * inputs[c * PLACES + place][None, :]
        plain, ones = sums[c]
        units = sum_by_unit(products) - (ZERO * plain + ones)[None, :]
        scaled = units * tile[c][1].to(tl.float32)
        if PACKED[2]:
            scaled += tile[c][2].to(tl.float32) * (plain * (1.0 / (1 << BITS)))[None, :]
        found = found + (scaled,)
    total = found[0]
    for c in tl.static_range(1, len(tile)):
        total += found[c]
    return tl.sum(total, axis=1)


@triton.jit
def multiply(
    tiles: tl.tuple,
    factors: tl.tuple,
    row: tl.tuple,
    scale: tl.tensor,
    num_rows: tl.tensor,
    PACKED: tl.constexpr,
) -> tl.tuple:
    """Return the scaled products of each tile with a vector."""
    found: tl.tuple = ()
    # The bits of 1.0. With a constant the compiler needs one more instruction for each number.
    one = tl.where(num_rows > 0, 0x3F800000, 0)
    for part in tl.static_range(len(tiles)):
        if PACKED[0] > 0:
            products = multiply_packed_tile(tiles[part], row, one, PACKED)
        else:
            products = multiply_tile(tiles[part], row)
        found = found + (products * scale * factors[part],)
    return found
