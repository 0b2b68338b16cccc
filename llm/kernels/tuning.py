"""How products are cut, by shape and number of rows: rules that `benchmarks.kernels --tune` found.

On an H200 every thread should ask for 128 to 256 bytes at once, in few and small programs, so that
the next kernel's programs fit beside them. Only where a row of the matrix is long is it better that
programs go on to another tile. From three rows on BLAS is as fast.
"""

from __future__ import annotations

from llm.kernels.blocks import Blocks

MAX_ROWS = 2
MAX_BLOCK_IN = 2048
THREAD_BYTES, LONG_THREAD_BYTES = 192, 256
LONG_INPUTS = 4096  # from here on: twice the threads and two tiles in flight
LONG_PROGRAMS = 264  # two for each processor of an H200
MANY_OUTPUTS = 65_536
WEIGHT_BYTES = 2


def blocks_for(num_out: int, num_in: int, num_rows: int, *, parts: int = 1) -> Blocks | None:
    """The way to cut a product of `parts` matrices [num_out, num_in]; None: BLAS is faster."""
    if num_rows > MAX_ROWS:
        return None
    is_long = num_in >= LONG_INPUTS
    num_warps = 8 if is_long else 4
    thread_bytes = LONG_THREAD_BYTES if is_long else THREAD_BYTES
    lines = num_warps * 32 * thread_bytes // (parts * num_in * WEIGHT_BYTES)
    block_out = min(max(_power_below(lines), 2), 16)  # a rotation needs two neighbours
    if num_out >= MANY_OUTPUTS:
        block_out = max(block_out, 8)
    programs = LONG_PROGRAMS if is_long and num_rows == 1 else 0
    return Blocks(block_out, _block_in(num_in), num_warps, programs)


def _power_below(number: int) -> int:
    """The largest power of two that is not above; 1 for what is smaller."""
    return 1 << max(number.bit_length() - 1, 0)


def _block_in(num_in: int) -> int:
    """A power of two that divides the inputs; where that would be small, one that leaves a rest."""
    divisor = num_in & -num_in
    if divisor < 512:
        divisor = min(1024, 1 << (num_in - 1).bit_length())
    return min(divisor, MAX_BLOCK_IN)
