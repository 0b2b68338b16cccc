"""`fetch`: memory of the device brought into its cache before it is read; for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AHEAD_BYTES = 8 * 2**20  # of a matrix: about what is read while no program has work
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
FETCH = tl.constexpr("""{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first cp.async.bulk.prefetch.L2.global [$1], $2;
mov.u32 $0, 0;
}""")


@triton.jit
def fetch(start: tl.tensor, size: tl.tensor) -> None:
    """Ask for `size` > 0 bytes at the pointer `start`, both multiples of 16. Nothing waits for
    them. Needs compute capability 9.0.
    """
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            FETCH,
            "=r,l,r",
            [start.to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch_share(ahead: tl.tuple) -> None:
    """Ask for a program's share of the bytes of `ahead_of`. Shares are those of the programs
    (n, 0).
    """
    first = tl.program_id(0) * ahead[2]
    if first < ahead[1] and tl.program_id(1) == 0:
        start = ahead[0].to(tl.pointer_type(tl.uint8)) + first
        fetch(start, tl.minimum(ahead[2], ahead[1] - first))


def ahead_of(matrix: Tensor | None, other: Tensor, num_programs: int) -> tuple[Tensor, int, int]:
    """Return the arguments of `fetch_share` for the beginning of a matrix, or for nothing: a
    tensor (`other` for nothing), the number of bytes, and a program's share of them.
    """
    if matrix is None:
        return other, 0, 0
    size = min(AHEAD_BYTES, matrix.nbytes) // 16 * 16
    return matrix, size, -(-size // (16 * num_programs)) * 16
