"""Rows rounded to float8 with a scale each, alone or after a norm or a gate; in one kernel each.

The rounding is that of `llm.kernels.rounding.quantize_rows`. A norm or a gate
is rounded to the format of its input first, as that of other layers is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for
from llm.kernels.rounding import FLOAT8, Float8Rows
from llm.kernels.tiles import row_factors

VALUES, NORM, GATE = 0, 1, 2  # operation before the rounding


@triton.jit
def _quantize_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one row: of `SIZE` values, or for a gate of twice as many."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    if BEFORE == 1:
        gains = tl.load(gain + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL > 0:
        gdc_wait()
    start = x + row * (2 * SIZE if BEFORE == 2 else SIZE)
    values = tl.load(start + places, mask=mask, other=0.0).to(tl.float32)
    if BEFORE == 1:
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) + epsilon) * gains
    if BEFORE == 2:
        up = tl.load(start + SIZE + places, mask=mask, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * up
    values = values.to(x.dtype.element_ty).to(tl.float32)
    inverse, scale = row_factors(tl.max(tl.abs(values), axis=0))
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(out + row * SIZE + places, (values * inverse).to(tl.float8e4nv), mask=mask)
    tl.store(scales + row, scale)


def _launch(
    x: Tensor, size: int, before: int, *, level: int, gain: Tensor | None = None, epsilon: float = 0
) -> Float8Rows:
    num_rows = len(x)
    level = level_for(level, num_rows)
    values = x.new_empty(num_rows, size, dtype=FLOAT8)
    scales = x.new_empty(num_rows, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _quantize_kernel[(num_rows,)](
        x,
        x if gain is None else gain,
        values,
        scales,
        epsilon,
        SIZE=size,
        BLOCK=block,
        BEFORE=before,
        LEVEL=level,
        num_warps=min(16, max(1, block // 512)),
        launch_pdl=level > 0,
    )
    return Float8Rows(values, scales)


def quantize(x: Tensor, *, level: int = 0) -> Float8Rows:
    """Round rows of x [T, K]."""
    return _launch(x.contiguous(), x.shape[1], VALUES, level=level)


def normalise_quantized(x: Tensor, gain: Tensor, epsilon: float, *, level: int = 0) -> Float8Rows:
    """Round rows [T, K] of x / √(Σx² + epsilon) × gain."""
    return _launch(x, x.shape[1], NORM, gain=gain, epsilon=epsilon, level=level)


def gate_quantized(gate_up: Tensor, *, level: int = 0) -> Float8Rows:
    """Round rows [T, I] of silu(gate) × up, for [T, 2 × I] gate and up."""
    return _launch(gate_up, gate_up.shape[1] // 2, GATE, level=level)
