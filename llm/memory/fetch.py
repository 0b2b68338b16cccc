"""`fetch`: memory of the device brought into its cache before it is read; for Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

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
