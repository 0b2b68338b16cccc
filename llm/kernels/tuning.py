"""Tile sizes of products by shape and number of rows: rules that `benchmarks.kernels --tune` found.

On an H200 every thread should load 128 to 256 bytes at once, in few and small programs, so that the
next kernel's programs fit on the device at the same time. Only for long rows of the matrix should
programs process several tiles. From three rows on BLAS is as fast.

For float8 weights the rules follow from the compiled code, and have not been timed: a program's own
work on the row costs as much as that on 200 bytes of weights a thread, so threads load as many
bytes as those of bfloat16. Where that needs more registers than two tiles in flight leave, each
program has one tile. With sums in float16 16 rows of the matrix in chunks of 512 inputs were the
fastest on an H100, or for long rows what loads 256 bytes a thread: more chunks are added that way.
Eight warps of them with few inputs are compiled for so few registers that a processor has room for
three programs: timed only together with the rounding by part (818 instead of 788 tokens/s of Llama
3B on an H200).

From three rows to `MAX_SPLIT_ROWS` `split_tiles` are those of the products of a depth transformer,
found with all of its kernels in one graph on an H100, `MAX_SPLITS` on an H200: each program fills
most of a processor's shared memory, so that the next kernel's programs do not share one while
others have none. The rows of two positions together have the same tiles with three stages, which
fit. Those of the head for more than `WIDE_ROWS` rows were found on an H200.
"""

from __future__ import annotations

from llm.kernels.blocks import Blocks, Tiles

MAX_ROWS = 2
MAX_BLOCK_IN = 2048
THREAD_BYTES, LONG_THREAD_BYTES = 192, 256
LONG_INPUTS = 4096  # from here on: twice the threads and two tiles in flight
LONG_PROGRAMS = 264  # two per processor of an H200
MANY_OUTPUTS = 65_536
MAX_WIDE_ROWS = 64  # with many outputs in float32
BLAS_OUTPUTS = 8  # for other than multiples of these BLAS chooses a kernel of older GPUs
HALF_OUTPUTS, HALF_BLOCK_IN = 16, 512
HALF_INPUTS = 2048  # up to here four warps
HALF_REGISTERS, MOST_HALF_INPUTS = 80, 3072  # three programs of eight warps fit on a processor
MAX_SPLIT_ROWS = 64  # rows of a Hopper tensor core
SPLIT_PROGRAMS = 128  # one for nearly every processor
SPLIT_BLOCK, MAX_SPLITS = 64, 4  # outputs of a program, half of them with more parts than these
WIDE_ROWS = 32  # above, a program of the head has fewer outputs, and one of a norm more warps
SPLIT_BYTES = 9 * 2**14  # a program's shared memory, at most
EARLY_BYTES = 3 * 2**16  # the same where all of its matrix is read at once
MAX_SLOTS = 4  # chunks of the rows that it then has there


def blocks_for(
    num_out: int,
    num_in: int,
    num_rows: int,
    *,
    parts: int = 1,
    weight_bytes: int = 2,
    in_half: bool = False,
) -> Blocks | None:
    """Return the tile sizes for `parts` matrices [num_out, num_in] of numbers of 2 bytes, or of 1
    (float8, and then perhaps `in_half`); None: BLAS is faster.
    """
    if num_rows > MAX_ROWS:
        return None
    is_long, is_float8 = num_in >= LONG_INPUTS, weight_bytes == 1
    if in_half and not is_long and num_in % HALF_BLOCK_IN == 0:
        num_warps = 4 if num_in <= HALF_INPUTS else 8
        is_limited = parts == num_rows == 1 and HALF_INPUTS < num_in <= MOST_HALF_INPUTS
        registers = HALF_REGISTERS if is_limited else None
        block_out = HALF_OUTPUTS // parts
        return Blocks(block_out, HALF_BLOCK_IN, num_warps, in_half=True, registers=registers)
    num_warps = 8 if is_long and not is_float8 else 4
    thread_bytes = LONG_THREAD_BYTES if is_long else THREAD_BYTES
    lines = num_warps * 32 * thread_bytes // (parts * num_in * weight_bytes)
    block_out = min(max(_power_below(lines), 2), 16)  # a rotation needs two neighbours
    if num_out >= MANY_OUTPUTS:
        block_out = max(block_out, 8)
    programs = LONG_PROGRAMS if is_long and num_rows == 1 and not is_float8 else 0
    return Blocks(block_out, _block_in(num_in), num_warps, programs, in_half)


def split_tiles(
    num_out: int, num_in: int, num_rows: int, *, parts: int = 1, is_whole: bool = False
) -> Tiles:
    """Return the tiles of `llm.kernels.split_products` for `parts` matrices [num_out, num_in], and
    rows up to twice `MAX_SPLIT_ROWS`.

    `is_whole`: the inputs are not divided, as with two parts.
    """
    block_in = min(128, max(16, 1 << (num_in - 1).bit_length()))
    stages = 4 if num_rows <= MAX_SPLIT_ROWS else 3
    if parts == 2 or is_whole:
        block_out = 16 if is_whole and num_rows > WIDE_ROWS else 32
        slots = _slots(parts * block_out, num_in, block_in, num_rows)
        return Tiles(block_out, 1, block_in, 4, stages, slots)
    chunks = -(-num_in // block_in)
    block_out, wanted = SPLIT_BLOCK, SPLIT_PROGRAMS * SPLIT_BLOCK // num_out
    if wanted > MAX_SPLITS:
        block_out, wanted = block_out // 2, min(wanted // 2, MAX_SPLITS)
    splits = -(-chunks // -(-chunks // max(1, wanted)))  # none without inputs
    slots = _slots(block_out, num_in // splits, block_in, num_rows) if splits else 0
    return Tiles(block_out, splits, block_in, 4, stages, slots)


def _slots(lines: int, num_in: int, block_in: int, num_rows: int) -> int:
    """Return `Tiles.slots` of a program with so many lines of the matrix and inputs; 0 where there
    is no room for them.
    """
    chunks, bytes_of_line = num_in // block_in, 2 * block_in
    room = EARLY_BYTES // bytes_of_line - lines * chunks
    slots = min(chunks, room // MAX_SPLIT_ROWS, MAX_SLOTS)
    takes = num_rows <= MAX_SPLIT_ROWS and bytes_of_line >= 128
    return slots if takes and slots >= min(chunks, 2) else 0


def _power_below(number: int) -> int:
    """Return the largest power of two that is not above; 1 for smaller values."""
    return 1 << max(number.bit_length() - 1, 0)


def _block_in(num_in: int) -> int:
    """Return a power of two that divides the inputs, or a larger one with a remainder."""
    divisor = num_in & -num_in
    if divisor < 512:
        divisor = min(1024, 1 << (num_in - 1).bit_length())
    return min(divisor, MAX_BLOCK_IN)
