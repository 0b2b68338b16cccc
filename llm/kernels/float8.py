"""Rows rounded to float8 with a scale each, alone or after a norm or a gate; in one kernel each.

The rounding is that of `llm.kernels.rounding.quantize_rows`. A norm or a gate
is rounded to the format of its input first, as that of other layers is. An input that is a
`ScaledProduct` is multiplied by its scales, and one may be added to what is normalised.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import GATE_BLOCK, level_for
from llm.kernels.launches import Launches, power_above
from llm.kernels.rounding import FLOAT8, Float8Rows, ScaledProduct
from llm.kernels.tiles import row_factors

VALUES, NORM, GATE = 0, 1, 2  # operation before the rounding


@triton.jit
def load_scaled(
    start: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    row_scale: tl.tensor,
    scales: tl.tensor,
    IS_SCALED: tl.constexpr,
) -> tl.tensor:
    """Load values in float32, and multiply them by their scales if they have any."""
    values = tl.load(start + places, mask=mask, other=0.0).to(tl.float32)
    if IS_SCALED:
        values *= row_scale * tl.load(scales + places, mask=mask, other=0.0)
    return values


@triton.jit
def _quantize_kernel(
    x: tl.tensor,
    added: tl.tensor,
    factors: tl.tuple,
    gain: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    ADDS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one row: of `SIZE` values, or for a gate of twice as many. With `ADDS` the row of
    `added` is added to x first. `factors`: scales of the rows and of the columns of `added`, or
    without it of x.
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    if BEFORE == 1:
        gains = tl.load(gain + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL > 0:
        gdc_wait()
    row_scale = 1.0
    if IS_SCALED:
        row_scale = tl.load(factors[0] + row)
    start = x + row * (2 * SIZE if BEFORE == 2 else SIZE)
    values = load_scaled(start, places, mask, row_scale, factors[1], IS_SCALED and not ADDS)
    if ADDS:
        rest = added + row * SIZE
        values += load_scaled(rest, places, mask, row_scale, factors[1], IS_SCALED)
        values = values.to(x.dtype.element_ty)
        tl.store(start + places, values, mask=mask)
        values = values.to(tl.float32)
    if BEFORE == 1:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) + epsilon) * gains
    if BEFORE == 2:
        up = load_scaled(
            start + SIZE, places, mask, row_scale, factors[1] + SIZE, IS_SCALED and not ADDS
        )
        values = values / (1.0 + tl.exp(-values)) * up
    values = values.to(x.dtype.element_ty).to(tl.float32)
    inverse, scale = row_factors(tl.max(tl.abs(values), axis=0))
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(out + row * SIZE + places, (values * inverse).to(tl.float8e4nv), mask=mask)
    tl.store(scales + row, scale)


def _launch(
    x: Tensor | ScaledProduct,
    size: int,
    before: int,
    *,
    level: int,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    added: ScaledProduct | None = None,
) -> Float8Rows:
    scaled = x if added is None else added
    factors = scaled[1:] if isinstance(scaled, ScaledProduct) else None
    x = x.values if isinstance(x, ScaledProduct) else x
    num_rows = len(x)
    level = level_for(level, num_rows)
    values = x.new_empty(num_rows, size, dtype=FLOAT8)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    block = power_above(size)
    _launch_quantize(
        (num_rows, 1, 1),
        (
            x,
            x if added is None else added.values,
            (x, x) if factors is None else factors,
            x if gain is None else gain,
            values,
            scales,
            epsilon,
        ),
        (size, block, before, added is not None, factors is not None, level),
        num_warps=min(16, max(1, block // 512)),
        is_early=level > 0,
    )
    return Float8Rows(values, scales)


_launch_quantize = Launches(_quantize_kernel)


def quantize(x: Tensor, *, level: int = 0) -> Float8Rows:
    """Round rows of x [T, K]."""
    return _launch(x.contiguous(), x.shape[1], VALUES, level=level)


def normalise_quantized(
    x: Tensor,
    gain: Tensor,
    epsilon: float,
    *,
    added: ScaledProduct | None = None,
    level: int = 0,
) -> Float8Rows:
    """Round rows [T, K] of x / √(Σx² + epsilon) × gain, after `added` [T, K] is added to x."""
    return _launch(x, x.shape[1], NORM, gain=gain, epsilon=epsilon, added=added, level=level)


def gate_quantized(gate_up: Tensor | ScaledProduct, *, level: int = 0) -> Float8Rows:
    """Round rows [T, I] of silu(gate) × up, for [T, 2 × I] gate and up."""
    values = gate_up.values if isinstance(gate_up, ScaledProduct) else gate_up
    return _launch(gate_up, values.shape[1] // 2, GATE, level=level)


@triton.jit
def _add_kernel(
    x: tl.tensor,
    added: tl.tensor,
    row_scales: tl.tensor,
    scales: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    if LEVEL == 2:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = places < SIZE
    if LEVEL > 0:
        gdc_wait()
    rest = added + row * SIZE
    values = load_scaled(rest, places, mask, tl.load(row_scales + row), scales, True)
    values += tl.load(x + row * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(x + row * SIZE + places, values, mask=mask)


def add_scaled(x: Tensor, added: ScaledProduct, *, level: int = 0) -> None:
    """Add a product [T, N] to x."""
    num_rows, size = x.shape
    level = level_for(level, num_rows)
    _launch_add(
        (num_rows, -(-size // GATE_BLOCK), 1),
        (x, *added),
        (size, GATE_BLOCK, level),
        num_warps=4,
        is_early=level > 0,
    )


_launch_add = Launches(_add_kernel)
