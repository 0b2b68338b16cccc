"""Triton kernels: group norm over each row's own columns and SiLU, laid out for a convolution; and
RMS norm. Both read float32 and write the type of the product behind them.

Imported only where there is a GPU; the references are in decoder.codecs.xcodec2.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

COLUMNS = tl.constexpr(128)
TAPS = tl.constexpr(3)


@triton.jit
def _group_norm_silu_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    span: tl.tuple,
    sizes: tl.tuple,  # channels of a group, columns
    eps: tl.tensor,
    CHANNELS: tl.constexpr,  # a power of two
) -> None:
    """Program (g, b): normalise one group of one row. Mean first, then the squares."""
    group, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channels, length = sizes
    width = tl.num_programs(0) * channels
    first, last = own_columns(span, row, length)
    c = tl.arange(0, CHANNELS)[None]
    has_channel = c < channels
    c += group * channels
    source = x + row * length * width + c
    count = (last - first) * channels * 1.0
    total = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[:, None]
        own = has_channel & (t >= first) & (t < last)
        total += tl.load(source + t * width, mask=own, other=0.0)
    mean = tl.sum(total) / count
    total = tl.zeros([COLUMNS, CHANNELS], tl.float32)
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[:, None]
        own = has_channel & (t >= first) & (t < last)
        off = tl.load(source + t * width, mask=own, other=0.0) - mean
        total += tl.where(own, off * off, 0.0)
    scale = tl.rsqrt(tl.sum(total) / count + eps)
    factor = tl.load(weight + c, mask=has_channel, other=0.0) * scale
    shift = tl.load(bias + c, mask=has_channel, other=0.0)
    target = out + row * length * TAPS * width + c
    for column in range(0, length, COLUMNS):
        t = column + tl.arange(0, COLUMNS)[:, None]
        for tap in tl.static_range(TAPS):
            near = t + (tap - TAPS // 2)
            own = has_channel & (near >= first) & (near < last)
            value = (tl.load(source + near * width, mask=own, other=0.0) - mean) * factor + shift
            value = tl.where(own, value / (1.0 + tl.exp(-value)), 0.0)
            tl.store(target + (t * TAPS + tap) * width, value, mask=has_channel & (t < length))


def group_norm_silu(norm: nn.GroupNorm, x: Tensor, own: Span | None, dtype: torch.dtype) -> Tensor:
    """Normalise x [B, T, C] float32, contiguous. Return [B, T, 3 C]: each column between its
    neighbours, with zeros for padding, so that a product with a matrix is a convolution of 3 taps.
    """
    assert x.is_contiguous()
    rows, length, channels = x.shape
    size = channels // norm.num_groups
    out = x.new_empty(rows, length, TAPS.value * channels, dtype=dtype)
    _group_norm_silu_kernel[norm.num_groups, rows](
        x,
        norm.weight,
        norm.bias,
        out,
        span_arguments(own),
        (size, length),
        norm.eps,
        CHANNELS=triton.next_power_of_2(size),
        num_warps=8,
    )
    return out


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,  # a power of two, at least the size
) -> None:
    """Program (i): one line."""
    line = tl.program_id(0).to(tl.int64) * size
    c = tl.arange(0, BLOCK)
    value = tl.load(x + line + c, mask=c < size, other=0.0)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(weight + c, mask=c < size, other=0.0)
    tl.store(out + line + c, value * scale * gain, mask=c < size)


def rms_norm(norm: nn.RMSNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalise x [..., C] float32, contiguous."""
    assert x.is_contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x, dtype=dtype)
    _rms_norm_kernel[x.numel() // size,](
        x, norm.weight, out, size, norm.eps, BLOCK=triton.next_power_of_2(size), num_warps=4
    )
    return out
