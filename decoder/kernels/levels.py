"""A Triton kernel: the levels of codes, laid out for a convolution over them.

Imported only where there is a GPU; the reference is in decoder.codecs.xcodec2.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

COLUMNS = tl.constexpr(16)


@triton.jit
def _levels_kernel(
    codes: tl.tensor,
    levels: tl.tensor,
    strides: tl.tensor,
    out: tl.tensor,
    span: tl.tuple,
    sizes: tl.tuple,  # numbers of a code, columns, columns of out, stride of rows of codes
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two
) -> None:
    """Program (t, b): `COLUMNS` columns of one row."""
    row = tl.program_id(1).to(tl.int64)
    count, length, width, stride = sizes
    first, last = own_columns(span, row, length)
    t = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    place = tl.arange(0, WIDTH)[None]
    part = place % (count + 1)
    near = t + place // (count + 1) - TAPS // 2
    own = (near >= first) & (near < last) & (place < TAPS * (count + 1))
    code = tl.load(codes + row * stride + near, mask=own, other=0)
    number = tl.load(levels + part, mask=part < count, other=2)
    index = code // tl.load(strides + part, mask=part < count, other=1) % number
    half = number // 2
    value = tl.where(part < count, (index - half).to(tl.float32) / half.to(tl.float32), 1.0)
    target = out + (row * length + t) * width + place
    tl.store(target, tl.where(own, value, 0.0), mask=(t < length) & (place < width))


def levels_of(
    codes: Tensor, levels: Tensor, strides: Tensor, taps: int, width: int, own: Span | None
) -> Tensor:
    """Return float32 [B, T, width] of codes [B, T]: for each of the taps, the levels of the code
    there and a 1; zeros where there is none, and in the remaining columns.
    """
    rows, length = codes.shape
    assert codes.stride(1) == 1
    out = torch.empty((rows, length, width), device=codes.device)
    _levels_kernel[triton.cdiv(length, COLUMNS.value), rows](
        codes,
        levels,
        strides,
        out,
        span_arguments(own),
        (len(levels), length, width, codes.stride(0)),
        TAPS=taps,
        WIDTH=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out
