"""Triton kernels of snakes: each reads and writes its values once.

    snake              x ──▶ x + sin²(a x) / a
    scaled snake       x ──▶ x + h sin²(a x)
    depthwise unit     x ──▶ snake ──▶ dilated depthwise convolution (7) ──▶ snake

Imported only where there is a GPU; the references are in decoder.codecs.snake.decoder, that of the
scaled one in decoder.codecs.qwen3_tts.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

BLOCK = tl.constexpr(1024)
TAPS = tl.constexpr(7)
COLUMNS = tl.constexpr(10)  # per channel: both alphas, the bias, the taps


@triton.jit
def _squared_sine(x: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    """Reduce the angle by whole half turns, which do not change sin², then use Taylor's series of
    sin(πr) up to r¹¹: within 6e-8 for |r| ≤ ½.
    """
    turns = alpha * x * 0.3183098861837907
    r = turns - tl.floor(turns + 0.5)
    s = r * r
    series = 0.08214588661112823 - 0.007370430945714349 * s
    series = 2.550164039877345 + s * (-0.5992645293207919 + s * series)
    wave = r * (3.141592653589793 + s * (-5.16771278004997 + s * series))
    return wave * wave


@triton.jit
def _snake(x: tl.tensor, alpha: tl.tensor) -> tl.tensor:
    return x + _squared_sine(x, alpha) / (alpha + 1e-9)


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
    """Program (t, b C + c): compute `BLOCK` values of one channel of one row; out is contiguous.

    Padding is read as zero, whose snake is zero.
    """
    line = tl.program_id(1)
    first, last = own_columns(own, line // channels, length)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_own = (t >= first) & (t < last)
    values = tl.load(x + line.to(tl.int64) * stride + t, mask=is_own, other=0.0)
    result = _snake(values, tl.load(alphas + line % channels))
    tl.store(out + line.to(tl.int64) * length + t, result, mask=t < length)


@triton.jit
def _scaled_snake_kernel(
    x: tl.tensor,
    alphas: tl.tensor,
    heights: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
) -> None:
    """Program (b C + c, t): like `_snake_kernel` without padding, with a height for each channel
    and lines of out that may be apart, too.
    """
    line = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + line.to(tl.int64) * stride + t, mask=t < length, other=0.0)
    wave = _squared_sine(values, tl.load(alphas + line % channels))
    result = values + tl.load(heights + line % channels) * wave
    tl.store(out + line.to(tl.int64) * out_stride + t, result, mask=t < length)


@triton.jit
def _unit_kernel(
    x: tl.tensor,
    packed: tl.tensor,
    out: tl.tensor,
    own: tl.tuple,
    channels: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    dilation: tl.tensor,
) -> None:
    """Like `_snake_kernel` for a unit; values outside of the row are zeros, too."""
    line = tl.program_id(1)
    first, last = own_columns(own, line // channels, length)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = x + line.to(tl.int64) * stride
    parameters = packed + line % channels * COLUMNS
    total = tl.zeros([BLOCK], tl.float32) + tl.load(parameters + 2)
    for tap in tl.static_range(TAPS):
        at = t + (tap - TAPS // 2) * dilation
        values = tl.load(start + at, mask=(at >= first) & (at < last), other=0.0)
        total += tl.load(parameters + 3 + tap) * _snake(values, tl.load(parameters))
    result = _snake(total, tl.load(parameters + 1))
    tl.store(out + line.to(tl.int64) * length + t, result, mask=t < length)


def snake(x: Tensor, alpha: Tensor, own: Span | None) -> Tensor:
    """Apply snake to x [B, C, T] with equally spaced lines; alpha [1, C, 1].

    The result is zero in padding.
    """
    grid, out = _prepared(x)
    _snake_kernel[grid](x, alpha, out, span_arguments(own), x.shape[1], x.shape[2], x.stride(1))
    return out


def scaled_snake(x: Tensor, alphas: Tensor, heights: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply a snake to x [B, C, T] with equally spaced lines; alphas and heights [C].

    The result is written to `out`, of x's shape and also with equally spaced lines, if given.
    """
    rows, channels, length = x.shape
    _check_lines(x)
    out = x.new_empty(x.shape) if out is None else out
    _check_lines(out)
    grid = (rows * channels, triton.cdiv(length, BLOCK.value))  # the second one is limited
    strides = x.stride(1), out.stride(1)
    _scaled_snake_kernel[grid](x, alphas, heights, out, channels, length, *strides)
    return out


def pack_unit(alpha_in: Tensor, alpha_out: Tensor, convolution: nn.Conv1d) -> Tensor:
    """Return the parameters of `depthwise_unit` [C, 10] for a depthwise convolution and its
    snakes.
    """
    bias = convolution.bias
    assert bias is not None
    columns = (alpha_in.view(-1, 1), alpha_out.view(-1, 1), bias.view(-1, 1))
    return torch.cat((*columns, convolution.weight.flatten(1)), dim=1).detach().contiguous()


def depthwise_unit(x: Tensor, packed: Tensor, dilation: int, own: Span | None) -> Tensor:
    """Apply a depthwise unit to x [B, C, T] as in `snake`; padding counts as zero."""
    grid, out = _prepared(x)
    sizes = x.shape[1], x.shape[2], x.stride(1)
    _unit_kernel[grid](x, packed, out, span_arguments(own), *sizes, dilation)
    return out


def _prepared(x: Tensor) -> tuple[tuple[int, int], Tensor]:
    """Return the grid of programs, and the output tensor."""
    rows, channels, length = x.shape
    _check_lines(x)
    out = torch.empty((rows, channels, length), dtype=x.dtype, device=x.device)
    return (triton.cdiv(length, BLOCK.value), rows * channels), out


def _check_lines(x: Tensor) -> None:
    """Check that the lines of x [B, C, T] are equally spaced."""
    assert x.stride(2) == 1
    assert x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
