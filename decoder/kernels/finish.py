"""Triton kernels for rendered rows: store tails for the crossfade, blend, and convert.

Imported only where there is a GPU; the reference is decoder.batching on the host, bit for bit.
Therefore products and sums must not be fused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)
S16_SCALE = tl.constexpr(32767.0)
TO_EVEN = tl.constexpr(12582912.0)
"""1.5 · 2²³: adding and subtracting it rounds a float32 below 2²², half to even."""

NUMBERS = 5
"""Numbers per row: its samples, slot and length of the tail to blend with, and of its own tail."""


@triton.jit(do_not_specialize=["size"])  # one kernel for rows of all widths
def _keep_kernel(
    rows: tl.tensor, about: tl.tensor, tails: tl.tensor, size: tl.tensor, fade: tl.tensor
) -> None:
    """Program (t, b): copy `BLOCK` samples after row b's own into its slot of tails [N, fade]."""
    row = tl.program_id(1).to(tl.int64)
    about += row * 5
    num_samples, slot, length = tl.load(about), tl.load(about + 3), tl.load(about + 4)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(rows + row * size + num_samples + t, mask=t < length, other=0.0)
    tl.store(tails + slot * fade + t, values, mask=t < length)


@triton.jit(do_not_specialize=["size"])
def _finish_kernel(
    rows: tl.tensor,
    about: tl.tensor,
    tails: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    fade: tl.tensor,
) -> None:
    """Program (t, b): blend `BLOCK` samples of row b, and convert to int16 if `out` is int16."""
    row = tl.program_id(1).to(tl.int64)
    about += row * 5
    num_samples, slot, length = tl.load(about), tl.load(about + 1), tl.load(about + 2)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(rows + row * size + t, mask=t < num_samples, other=0.0)
    tail = tl.load(tails + slot * fade + t, mask=t < length, other=0.0)
    rising = ((t.to(tl.float64) + 0.5) / tl.maximum(length, 1).to(tl.float64)).to(tl.float32)
    faded = tail * (1.0 - rising) + values * rising
    values = tl.where(t < length, faded, values)
    if out.dtype.element_ty == tl.int16:
        values = tl.where((values <= 0.0) | (values > 0.0), values, 0.0)  # NaN becomes 0
        values = tl.minimum(tl.maximum(values, -1.0), 1.0) * S16_SCALE
        values = (values + TO_EVEN) - TO_EVEN
    tl.store(out + row * size + t, values.to(out.dtype.element_ty), mask=t < num_samples)


def keep_tails(rows: Tensor, about: Tensor, tails: Tensor) -> None:
    """Store the tails: rows float32 [B, S], about int64 [B, 5], tails float32 [N, fade]; all
    contiguous.
    """
    fade = tails.shape[1]
    grid = triton.cdiv(fade, BLOCK.value), len(rows)
    _keep_kernel[grid](rows, about, tails, rows.shape[1], fade, enable_fp_fusion=False)


def finish(rows: Tensor, about: Tensor, tails: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows float32 [B, S], blended, as float32 or int16; undefined past a row's samples."""
    assert rows.is_contiguous()
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    size, fade = rows.shape[1], tails.shape[1]
    grid = triton.cdiv(size, BLOCK.value), len(rows)
    _finish_kernel[grid](rows, about, tails, out, size, fade, enable_fp_fusion=False)
    return out
