"""Tile sizes of products by shape and number of rows: rules that `benchmarks.kernels --tune` found.

On an H200 every thread should load 128 to 256 bytes at once, in few and small programs, so that the
next kernel's programs fit on the device at the same time. Only for long rows of the matrix should
programs process several tiles. From three rows on BLAS is as fast.

For float8 weights 16 rows of the matrix in chunks of 512 inputs were the fastest on an H100, or for
long rows what loads 256 bytes a thread. More chunks are added in float16 that way.

Those for packed matrices follow from the compiled code, too. A program's threads are along the
inputs, so that each holds only the inputs of one unit of 16 bytes of each output.
"""

from __future__ import annotations

from llm.kernels.blocks import Blocks
from llm.kernels.words import UNIT_BITS

MAX_ROWS = 2
MAX_BLOCK_IN = 2048
THREAD_BYTES, LONG_THREAD_BYTES = 192, 256
LONG_INPUTS = 4096  # from here on: twice the threads and two tiles in flight
LONG_PROGRAMS = 264  # two per processor of an H200
MANY_OUTPUTS = 65_536
FLOAT8_OUTPUTS, FLOAT8_BLOCK_IN = 16, 512
FLOAT8_INPUTS = 2048  # up to here four warps
PACKED_UNITS = 16  # units of 16 bytes that a thread loads at once, by row


def blocks_for(
    num_out: int, num_in: int, num_rows: int, *, parts: int = 1, weight_bytes: int = 2
) -> Blocks | None:
    """Return the tile sizes for `parts` matrices [num_out, num_in] of numbers of 2 bytes, or of 1
    (float8); None: BLAS is faster.
    """
    if num_rows > MAX_ROWS:
        return None
    is_long, is_float8 = num_in >= LONG_INPUTS, weight_bytes == 1
    if is_float8 and not is_long and num_in % FLOAT8_BLOCK_IN == 0:
        num_warps = 4 if num_in <= FLOAT8_INPUTS else 8
        return Blocks(FLOAT8_OUTPUTS // parts, FLOAT8_BLOCK_IN, num_warps)
    num_warps = 8 if is_long and not is_float8 else 4
    thread_bytes = LONG_THREAD_BYTES if is_long else THREAD_BYTES
    lines = num_warps * 32 * thread_bytes // (parts * num_in * weight_bytes)
    block_out = min(max(_power_below(lines), 2), 16)  # a rotation needs two neighbours
    if num_out >= MANY_OUTPUTS:
        block_out = max(block_out, 8)
    programs = LONG_PROGRAMS if is_long and num_rows == 1 and not is_float8 else 0
    return Blocks(block_out, _block_in(num_in), num_warps, programs)


def packed_blocks(
    num_out: int, num_in: int, num_rows: int, *, parts: int = 1, bits: int = 4
) -> Blocks | None:
    """Return the tile sizes for `parts` packed matrices [num_out, num_in]; None: the kernel of many
    rows is faster.
    """
    if num_rows > MAX_ROWS:
        return None
    unit = UNIT_BITS // bits
    threads = 1 << (-(-num_in // unit) - 1).bit_length()
    num_warps = min(max(threads // 32, 4), 8)
    block_in = min(threads, num_warps * 32) * unit
    per_output = parts * -(-num_in // block_in) * max(num_rows, 1)
    block_out = min(max(_power_below(PACKED_UNITS // per_output), 2), 16)
    return Blocks(block_out, block_in, num_warps)


def _power_below(number: int) -> int:
    """Return the largest power of two that is not above; 1 for smaller values."""
    return 1 << max(number.bit_length() - 1, 0)


def _block_in(num_in: int) -> int:
    """Return a power of two that divides the inputs, or a larger one with a remainder."""
    divisor = num_in & -num_in
    if divisor < 512:
        divisor = min(1024, 1 << (num_in - 1).bit_length())
    return min(divisor, MAX_BLOCK_IN)
