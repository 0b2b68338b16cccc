"""The norm and the gate for any number of rows, in one kernel each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.launches import Launches, power_above

GATE_BLOCK = 1024
MANY_ROWS = 512


def level_for(level: int, num_rows: int) -> int:
    """Return the launch level of a kernel that may have more programs than the device runs at once.

    There, a successor's early programs would only delay those that still have to run.
    """
    return level if num_rows < MANY_ROWS else min(level, 1)


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    if LEVEL == 2:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    mask = places < SIZE
    gains = tl.load(gain + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL > 0:
        gdc_wait()
    values = tl.load(x + row * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) + epsilon)
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(out + row * SIZE + places, values * scale * gains, mask=mask)


def normalise(x: Tensor, gain: Tensor, epsilon: float, *, level: int = 0) -> Tensor:
    """Return [T, K]: x / √(Σx² + epsilon) × gain, each row by itself."""
    num_rows, size = x.shape
    level = level_for(level, num_rows)
    out = x.new_empty(num_rows, size)
    block = power_above(size)
    _launch_norm(
        (num_rows, 1, 1),
        (x, gain, out, epsilon),
        (size, block, level),
        num_warps=min(16, max(1, block // 512)),
        is_early=level > 0,
    )
    return out


_launch_norm = Launches(_norm_kernel)


@triton.jit
def _gate_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
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
    gate = tl.load(gate_up + row * 2 * SIZE + places, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL == 1:
        gdc_launch_dependents()
    tl.store(out + row * SIZE + places, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


def gate(gate_up: Tensor, *, level: int = 0) -> Tensor:
    """Return silu(gate) × up [T, I] for [T, 2 × I] gate and up."""
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    level = level_for(level, num_rows)
    out = gate_up.new_empty(num_rows, size)
    _launch_gate(
        (num_rows, -(-size // GATE_BLOCK), 1),
        (gate_up, out),
        (size, GATE_BLOCK, level),
        num_warps=4,
        is_early=level > 0,
    )
    return out


_launch_gate = Launches(_gate_kernel)
