"""Triton kernels of depthwise stages for values [B, T, C], the channels of a time side by side.

    snake rows    x ──▶ snake ──▶ [B, side + T + side, C], zeros at both sides
    unit rows     x ──▶ snake ──▶ dilated depthwise convolution (7) ──▶ snake
    exit rows     x ──▶ snake ──▶ convolution (7) to one channel ──▶ tanh
    product       base + offset of a channel + scale of a time * (a @ weights)

Neighbours of a time lie next to each other, so that a row of `product` can span several of them: a
transposed convolution is one product. Imported only where there is a GPU; the reference is
decoder.codecs.snake.decoder.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from decoder.kernels.snake import squared_sine
from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

TAPS = tl.constexpr(7)
LARGEST_HALF = tl.constexpr(65504.0)
STEPS = 8  # outputs of a chain of `_unit_kernel`
LANES = 8  # chains of a program of it
TIMES = 32  # columns in time of a program of `_snake_kernel`
CHANNELS = 64  # of a program of both


@triton.jit
def _narrowed(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return values in a number format, the largest of 16 bits in place of larger ones."""
    if dtype == tl.float16 and values.dtype == tl.float32:
        values = tl.clamp(values, -LARGEST_HALF, LARGEST_HALF)
    return values.to(dtype)


@triton.jit(do_not_specialize=["length"])
def _snake_kernel(
    x: tl.tensor,  # [B, T, C]
    table: tl.tensor,  # [2, C]
    out: tl.tensor,  # [B, SIDE + T + SIDE, C]
    own: tl.tuple,
    strides: tl.tuple,  # of x: of rows and columns
    channels: tl.tensor,
    length: tl.tensor,
    SIDE: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Program (t, c, b): a tile of one row."""
    row = tl.program_id(2).to(tl.int64)
    first, last = own_columns(own, row, length)
    at = tl.program_id(0) * TIMES + tl.arange(0, TIMES)[:, None]
    t = at - SIDE
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_own = (t >= first) & (t < last) & (c < channels)
    values = tl.load(x + row * strides[0] + t * strides[1] + c, mask=is_own, other=0.0)
    alpha = tl.load(table + c, mask=c < channels)
    height = tl.load(table + channels + c, mask=c < channels)
    result = values + height * squared_sine(values, alpha)
    place = out + row * (length + 2 * SIDE) * channels + at * channels + c
    result = _narrowed(result, out.dtype.element_ty)
    tl.store(place, result, mask=(at < length + 2 * SIDE) & (c < channels))


@triton.jit(do_not_specialize=["length", "dilation"])
def _unit_kernel(
    x: tl.tensor,  # [B, T, C]
    table: tl.tensor,  # [12, C]
    out: tl.tensor,  # [B, T, C], or [B, T]
    own: tl.tuple,
    strides: tl.tuple,  # of x: of rows and columns
    channels: tl.tensor,
    length: tl.tensor,
    dilation: tl.tensor,
    SUMS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Program (g, c, b): chains of times `dilation` apart, `STEPS` outputs each.

    A chain has the last seven snakes in registers, and computes each once. Values outside of the
    row count as zeros. `SUMS`: instead of the second snake, tanh of the sum of the channels, zero
    in padding.
    """
    row = tl.program_id(2).to(tl.int64)
    first, last = own_columns(own, row, length)
    chain = tl.program_id(0) * LANES + tl.arange(0, LANES)[:, None]
    start = chain // dilation * (dilation * STEPS) + chain % dilation
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_channel = c < channels
    column = table + c
    alpha = tl.load(column, mask=is_channel, other=0.0)
    height = tl.load(column + channels, mask=is_channel, other=0.0)
    alpha_out = tl.load(column + 2 * channels, mask=is_channel, other=0.0)
    height_out = tl.load(column + 3 * channels, mask=is_channel, other=0.0)
    bias = tl.load(column + 4 * channels, mask=is_channel, other=0.0)
    w0 = tl.load(column + 5 * channels, mask=is_channel, other=0.0)
    w1 = tl.load(column + 6 * channels, mask=is_channel, other=0.0)
    w2 = tl.load(column + 7 * channels, mask=is_channel, other=0.0)
    w3 = tl.load(column + 8 * channels, mask=is_channel, other=0.0)
    w4 = tl.load(column + 9 * channels, mask=is_channel, other=0.0)
    w5 = tl.load(column + 10 * channels, mask=is_channel, other=0.0)
    w6 = tl.load(column + 11 * channels, mask=is_channel, other=0.0)
    s0 = tl.zeros([LANES, CHANNELS], tl.float32)
    s1, s2, s3, s4, s5 = s0, s0, s0, s0, s0
    x += row * strides[0]
    for step in tl.static_range(STEPS + TAPS - 1):
        t = start + (step - TAPS // 2) * dilation
        is_own = (t >= first) & (t < last) & is_channel
        values = tl.load(x + t * strides[1] + c, mask=is_own, other=0.0)
        s6 = values + height * squared_sine(values, alpha)
        if step >= TAPS - 1:
            t -= TAPS // 2 * dilation
            total = bias + w0 * s0 + w1 * s1 + w2 * s2 + w3 * s3 + w4 * s4 + w5 * s5 + w6 * s6
            if SUMS:
                result = 2 * tl.sigmoid(2 * tl.sum(total, axis=1)[:, None]) - 1
                result = tl.where((t >= first) & (t < last), result, 0.0)
                tl.store(out + row * length + t, result, mask=t < length)
            else:
                result = total + height_out * squared_sine(total, alpha_out)
                place = out + row * length * channels + t * channels + c
                result = _narrowed(result, out.dtype.element_ty)
                tl.store(place, result, mask=(t < length) & is_channel)
        s0, s1, s2, s3, s4, s5 = s1, s2, s3, s4, s5, s6


@triton.jit(do_not_specialize=["num_rows", "length"])
def _product_kernel(
    a: tl.tensor,  # [B, T, K]
    weights: tl.tensor,  # [K, N]
    base: tl.tensor,  # [B, T, N]
    offsets: tl.tensor,  # [N]
    scales: tl.tensor,  # [B, T]
    out: tl.tensor,  # [B, T, N]
    strides: tl.tuple,
    sizes: tl.tuple,
    num_rows: tl.tensor,
    length: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """A tile of rows, numbered through all windows, and columns; out is contiguous.

    base has the strides of a or, where there are no scales, those of out.
    """
    batch_stride, row_stride = strides
    depth, width = sizes
    across = tl.cdiv(width, BLOCK_N)  # neighbours read the same rows
    m = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    lines = (m // length).to(tl.int64) * batch_stride + m % length * row_stride
    is_row, is_column = (m < num_rows)[:, None], (n < width)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        inner = first + k
        left = tl.load(
            a + lines[:, None] + inner[None, :], mask=is_row & (inner < depth)[None, :], other=0.0
        )
        right = tl.load(
            weights + inner[:, None] * width + n[None, :],
            mask=(inner < depth)[:, None] & is_column,
            other=0.0,
        )
        total = tl.dot(_narrowed(left, right.dtype), right, total)
    places = m.to(tl.int64)[:, None] * width + n[None, :]
    if scales is not None:
        total *= tl.load(scales + m, mask=m < num_rows, other=0.0)[:, None]
        total += tl.load(base + lines[:, None] + n[None, :], mask=is_row & is_column, other=0.0)
    elif base is not None:
        total += tl.load(base + places, mask=is_row & is_column, other=0.0)
    if offsets is not None:
        total += tl.load(offsets + n, mask=n < width, other=0.0)[None, :]
    tl.store(out + places, total, mask=is_row & is_column)


def pack_snake(alpha: Tensor) -> Tensor:
    """Return the parameters of `snake_rows` [2, C]: alphas, heights of the waves."""
    alpha = alpha.detach().flatten()
    return torch.stack((alpha, 1 / (alpha + 1e-9)))


def pack_unit(
    convolution: nn.Conv1d, alpha_in: Tensor | None = None, alpha_out: Tensor | None = None
) -> Tensor:
    """Return the parameters of `unit_rows` [12, C] for a depthwise convolution and the snakes
    before and behind it, or those of `exit_rows`. None: there is no snake.
    """
    assert convolution.bias is not None
    weights = convolution.weight.detach().view(-1, TAPS.value)
    table = weights.new_zeros((5 + TAPS.value, len(weights)))
    for place, alpha in enumerate((alpha_in, alpha_out)):
        if alpha is not None:
            table[2 * place : 2 * place + 2] = pack_snake(alpha)
    table[4, : len(convolution.bias)] = convolution.bias.detach()
    table[5:] = weights.T
    return table


def snake_rows(x: Tensor, table: Tensor, side: int, dtype: torch.dtype, own: Span | None) -> Tensor:
    """Apply a snake to x [B, T, C]; return it with `side` zeros before and behind each row.

    The result is zero in padding, too.
    """
    rows, length, channels = x.shape
    out = torch.empty((rows, length + 2 * side, channels), dtype=dtype, device=x.device)
    block = _block(channels)
    grid = triton.cdiv(length + 2 * side, TIMES), triton.cdiv(channels, block), rows
    shared = _shared_arguments(x, table, out, own)
    _snake_kernel[grid](*shared, SIDE=side, TIMES=TIMES, CHANNELS=block)
    return out


def unit_rows(
    x: Tensor, table: Tensor, dilation: int, dtype: torch.dtype, own: Span | None
) -> Tensor:
    """Apply a depthwise unit to x [B, T, C]; padding counts as zero in x and is undefined in the
    result.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch_unit(x, table, out, own, dilation, is_exit=False)
    return out


def exit_rows(x: Tensor, table: Tensor, own: Span | None) -> Tensor:
    """Apply a snake, a convolution and tanh to x [B, T, C]; return [B, T], zero in padding."""
    out = torch.empty(x.shape[:2], dtype=x.dtype, device=x.device)
    _launch_unit(x, table, out, own, 1, is_exit=True)
    return out


def _launch_unit(
    x: Tensor, table: Tensor, out: Tensor, own: Span | None, dilation: int, *, is_exit: bool
) -> None:
    rows, length, channels = x.shape
    block = triton.next_power_of_2(channels) if is_exit else _block(channels)
    chains = dilation * triton.cdiv(length, dilation * STEPS)
    grid = triton.cdiv(chains, LANES), triton.cdiv(channels, block), rows
    shared = _shared_arguments(x, table, out, own)
    _unit_kernel[grid](*shared, dilation, SUMS=is_exit, STEPS=STEPS, LANES=LANES, CHANNELS=block)


def _shared_arguments(x: Tensor, table: Tensor, out: Tensor, own: Span | None) -> tuple[Any, ...]:
    """Return the arguments with which both depthwise kernels begin."""
    _, length, channels = x.shape
    return x, table, out, span_arguments(own), _strides(x), channels, length


def product(
    a: Tensor,
    weights: Tensor,
    offsets: Tensor | None,
    *,
    onto: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Return float32 [B, T, N]: a [B, T, K] @ weights [K, N] + offsets [N].

    a may be a view whose rows share memory. `onto` [B, T, N], contiguous: the product is added to
    it, in place.
    `scales` [B, T]: the product is multiplied by them and added to a; then K = N.
    """
    rows, length, depth = a.shape
    width = weights.shape[1]
    out = a.new_empty((rows, length, width), dtype=torch.float32) if onto is None else onto
    assert out.is_contiguous()
    assert weights.is_contiguous()
    assert scales is None or scales.is_contiguous()
    base = onto if scales is None else a
    num_rows = rows * length
    block_m, block_n, num_warps, num_stages = product_blocks(width, is_deep=base is None)
    grid = (triton.cdiv(width, block_n) * triton.cdiv(num_rows, block_m),)
    _product_kernel[grid](
        a,
        weights,
        base,
        offsets,
        scales,
        out,
        _strides(a),
        (depth, width),
        num_rows,
        length,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=64,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


def product_blocks(width: int, *, is_deep: bool) -> tuple[int, int, int, int]:
    """Return rows and columns of a program's tile, warps and stages of the pipeline.

    A deep product is limited by the tensor cores, one onto other values by the memory.
    """
    if is_deep:
        return 128, 128, 8, 3
    return (64, 128, 4, 2) if width > 64 else (64, 64, 4, 2)


def _block(channels: int) -> int:
    return min(triton.next_power_of_2(channels), CHANNELS)


def _strides(x: Tensor) -> tuple[int, int]:
    assert x.stride(2) == 1
    return x.stride(0), x.stride(1)
