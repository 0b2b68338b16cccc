"""A Triton kernel: group norm over each row's own columns and SiLU, in one pass over the channels.

Imported only where there is a GPU; the reference is in decoder.codecs.xcodec2.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

COLUMNS = tl.constexpr(128)


@triton.jit
def _group_norm_silu_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    span: tl.tuple,
    sizes: tl.tuple,  # channels of a group, columns
    strides: tl.tuple,  # of x
    eps: tl.tensor,
    CHANNELS: tl.constexpr,  # a power of two
) -> None:
    """Program (g, b): normalise one group of one row; out is contiguous. Mean first, then the
    squares.
    """
    group, row = tl.program_id(0), tl.program_id(1)
    channels, length = sizes
    first, last = own_columns(span, row, length)
    c = tl.arange(0, CHANNELS)
    has_channel = c[:, None] < channels
    source = x + row.to(tl.int64) * strides[0] + (group * channels + c)[:, None] * strides[1]
    count = (last - first) * channels * 1.0
    total = tl.zeros([CHANNELS, COLUMNS], tl.float32)
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[None]
        own = has_channel & (t >= first) & (t < last)
        total += tl.load(source + t * strides[2], mask=own, other=0.0)
    mean = tl.sum(total) / count
    total = tl.zeros([CHANNELS, COLUMNS], tl.float32)
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[None]
        own = has_channel & (t >= first) & (t < last)
        off = tl.load(source + t * strides[2], mask=own, other=0.0) - mean
        total += tl.where(own, off * off, 0.0)
    scale = tl.rsqrt(tl.sum(total) / count + eps)
    factor = tl.load(weight + group * channels + c, mask=c < channels, other=0.0)[:, None] * scale
    shift = tl.load(bias + group * channels + c, mask=c < channels, other=0.0)[:, None]
    target = out + (row * tl.num_programs(0) * channels).to(tl.int64) * length
    target += (group * channels + c)[:, None] * length
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[None]
        own = has_channel & (t >= first) & (t < last)
        value = (tl.load(source + t * strides[2], mask=own, other=0.0) - mean) * factor + shift
        value = tl.where(own, value / (1.0 + tl.exp(-value)), 0.0)
        tl.store(target + t, value, mask=has_channel & (t < length))


def group_norm_silu(norm: nn.GroupNorm, x: Tensor, own: Span | None) -> Tensor:
    """Normalise x [B, C, T] float32, of any strides; the result is contiguous, with zeros in
    padding.
    """
    rows, channels, length = x.shape
    size = channels // norm.num_groups
    out = torch.empty((rows, channels, length), dtype=x.dtype, device=x.device)
    _group_norm_silu_kernel[norm.num_groups, rows](
        x,
        norm.weight,
        norm.bias,
        out,
        span_arguments(own),
        (size, length),
        x.stride(),
        norm.eps,
        CHANNELS=triton.next_power_of_2(size),
        num_warps=8,
    )
    return out
