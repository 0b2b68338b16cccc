"""Triton kernels of spectra: from log magnitudes and phases, and to samples by overlap.

Imported only where there is a GPU; the references are in decoder.codecs.xcodec2.modules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import Span

BLOCK = tl.constexpr(256)


@triton.jit
def _polar_kernel(
    polar: tl.tensor, out: tl.tensor, size: tl.tensor, stride: tl.tensor, most: tl.tensor
) -> None:
    """Program (m, k): `BLOCK` numbers of one spectrum, real and imaginary parts in turn."""
    line = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    magnitude = tl.load(polar + line * stride + k, mask=k < size, other=0.0)
    phase = tl.load(polar + line * stride + size + k, mask=k < size, other=0.0)
    magnitude = tl.minimum(tl.exp(magnitude), most)
    target = out + (line * size + k) * 2
    tl.store(target, magnitude * tl.cos(phase), mask=k < size)
    tl.store(target + 1, magnitude * tl.sin(phase), mask=k < size)


@triton.jit
def _overlap_kernel(
    pieces: tl.tensor,  # [B, F, N]
    window: tl.tensor,  # [N]
    out: tl.tensor,  # [B, S]
    span: tl.tuple,
    sizes: tl.tuple,  # pieces, samples, distance of pieces, first sample
    OVERLAP: tl.constexpr,
) -> None:
    """Program (t, b): `BLOCK` samples of one row."""
    row = tl.program_id(1).to(tl.int64)
    count, num_samples, hop, start = sizes
    first, last = own_columns(span, row, count)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block, place = (start + t) // hop, (start + t) % hop
    total, weight = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    size = OVERLAP * hop
    for shift in tl.static_range(OVERLAP):
        piece, at = block - shift, place + shift * hop
        own = (piece >= first) & (piece < last) & (t < num_samples)
        factor = tl.load(window + at, mask=own, other=0.0)
        value = tl.load(pieces + (row * count + piece) * size + at, mask=own, other=0.0)
        total += value / size * factor
        weight += factor * factor
    tl.store(out + row * num_samples + t, total / tl.maximum(weight, 1e-11), mask=t < num_samples)


def spectra_of(polar: Tensor, size: int, most: float) -> Tensor:
    """Return complex64 [B, F, size]; polar [B, F, ≥ 2 size] has log magnitudes, then phases.
    Magnitudes are at most `most`.
    """
    assert polar.is_contiguous()
    rows, count, stride = polar.shape
    out = polar.new_empty(rows, count, size, 2)
    grid = rows * count, triton.cdiv(size, BLOCK.value)  # the second one is limited
    _polar_kernel[grid](polar, out, size, stride, most, num_warps=4)
    return torch.view_as_complex(out)


def overlapped(
    pieces: Tensor, window: Tensor, overlap: int, start: int, num_samples: int, own: Span | None
) -> Tensor:
    """Return float32 [B, num_samples] from sample `start` of the windowed sum of pieces [B, F, N],
    each N / overlap samples behind the one before; pieces are inverse transforms without a factor.
    """
    assert pieces.is_contiguous()
    rows, count, size = pieces.shape
    out = pieces.new_empty(rows, num_samples)
    _overlap_kernel[triton.cdiv(num_samples, BLOCK.value), rows](
        pieces,
        window,
        out,
        span_arguments(own),
        (count, num_samples, size // overlap, start),
        OVERLAP=overlap,
        num_warps=4,
    )
    return out
