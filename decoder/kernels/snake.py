"""Triton kernels of snakes: each reads and writes its values once.

    snake              x ──▶ x + sin²(a x) / a
    scaled snake       x ──▶ y = x + b ──▶ y + h sin²(a y)

Imported only where there is a GPU; the references are in decoder.codecs.snake.decoder, that of the
scaled one in decoder.codecs.qwen3_tts.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

BLOCK = tl.constexpr(1024)


@triton.jit
def squared_sine(x: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    """Return sin²(alpha x), within 2e-6 while alpha x is at most 20.

    The angle is reduced by whole half turns, which do not change it: adding and subtracting
    1.5 * 2²³ rounds to a whole number, up to 2²². The polynomial in r² is within 6e-9 of sin²(πr)
    for |r| ≤ ½.
    """
    turns = alpha * 0.3183098861837907
    r = x * turns - ((x * turns + 12582912.0) - 12582912.0)
    s = r * r
    series = 12.990730325598193 - 3.272945935481116 * s
    series = 42.72538478890733 + s * (series * s - 30.085953175637556)
    return s * (9.869602920250154 + s * (series * s - 32.46958111579355))


@triton.jit
def _snake(x: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    return x + squared_sine(x, alpha) / (alpha + 1e-9)


@triton.jit
def _snake_kernel(
    x: tl.tensor,
    alphas: tl.tensor,
    out: tl.tensor,
    own: tl.tuple,
    channels: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
) -> None:
    """Program (b C + c, t): compute `BLOCK` values of one channel of one row; out is contiguous.

    Padding is read as zero, whose snake is zero.
    """
    line = tl.program_id(0)
    first, last = own_columns(own, line // channels, length)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_own = (t >= first) & (t < last)
    values = tl.load(x + line.to(tl.int64) * stride + t, mask=is_own, other=0.0)
    result = _snake(values, tl.load(alphas + line % channels))
    tl.store(out + line.to(tl.int64) * length + t, result, mask=t < length)


@triton.jit
def _scaled_snake_kernel(
    x: tl.tensor,
    biases: tl.tensor,
    alphas: tl.tensor,
    heights: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
) -> None:
    """Program (b C + c, t): like `_snake_kernel` without padding, with a bias and a height for
    each channel and lines of out that may be apart, too.
    """
    line = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + line.to(tl.int64) * stride + t, mask=t < length, other=0.0)
    values += tl.load(biases + line % channels)
    wave = squared_sine(values, tl.load(alphas + line % channels))
    result = values + tl.load(heights + line % channels) * wave
    tl.store(out + line.to(tl.int64) * out_stride + t, result, mask=t < length)


def snake(x: Tensor, alpha: Tensor, own: Span | None) -> Tensor:
    """Apply snake to x [B, C, T] with equally spaced lines; alpha [1, C, 1].

    The result is zero in padding.
    """
    rows, channels, length = x.shape
    _check_lines(x)
    out = torch.empty((rows, channels, length), dtype=x.dtype, device=x.device)
    grid = (rows * channels, triton.cdiv(length, BLOCK.value))  # the second one is limited
    _snake_kernel[grid](x, alpha, out, span_arguments(own), channels, length, x.stride(1))
    return out


def scaled_snake(
    x: Tensor, biases: Tensor, alphas: Tensor, heights: Tensor, out: Tensor | None = None
) -> Tensor:
    """Apply a snake to x [B, C, T] with equally spaced lines; biases, alphas and heights [C].

    The result is written to `out`, of x's shape and also with equally spaced lines, if given.
    """
    rows, channels, length = x.shape
    _check_lines(x)
    out = x.new_empty(x.shape) if out is None else out
    _check_lines(out)
    grid = (rows * channels, triton.cdiv(length, BLOCK.value))
    strides = x.stride(1), out.stride(1)
    _scaled_snake_kernel[grid](x, biases, alphas, heights, out, channels, length, *strides)
    return out


def _check_lines(x: Tensor) -> None:
    """Check that the lines of x [B, C, T] are equally spaced."""
    assert x.stride(2) == 1
    assert x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
