"""A Triton kernel: noise keyed by seed and index, of which torch makes some fifty kernels.

Imported only where there is a GPU; the reference is in decoder.keyed_noise.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(256)
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = tl.constexpr(0x94D049BB133111EB)
HALF_WORD = tl.constexpr(2**32)
ANGLE = tl.constexpr(2 * math.pi / 2**32)


@triton.jit
def _mix(words: tl.tensor) -> tl.tensor:
    """Mix the bits of unsigned words, as SplitMix64 does."""
    words += GAMMA
    words = (words ^ (words >> 30)) * FIRST_MULTIPLIER
    words = (words ^ (words >> 27)) * SECOND_MULTIPLIER
    return words ^ (words >> 31)


@triton.jit(do_not_specialize=["key", "rate", "first"])
def _noise_kernel(
    frames: tl.tensor,
    out: tl.tensor,
    key: tl.tensor,
    rate: tl.tensor,
    first: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
) -> None:
    """Program (t, b): `BLOCK` numbers of row b."""
    row = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = (tl.load(frames + row * stride) * rate + first + t).to(tl.uint64, bitcast=True)
    own = (key.to(tl.int64) + tl.zeros([BLOCK], tl.int64)).to(tl.uint64, bitcast=True)
    bits = _mix(_mix(index + own) ^ own)
    high, low = (bits >> 32).to(tl.float64), (bits & 0xFFFFFFFF).to(tl.float64)
    radius = tl.sqrt(tl.log((high + 0.5) / HALF_WORD) * -2.0)
    numbers = radius * tl.cos(low * ANGLE)
    tl.store(out + row * count + t, numbers.to(tl.float32), mask=t < count)


def noise_of(key: int, frames: Tensor, rate: int, first: int, count: int) -> Tensor:
    """Return float32 [B, count] for a `noise_key` and int64 `frames` [B, 1]: `keyed_noise` from
    the index frames * rate + first on.
    """
    out = torch.empty((len(frames), count), dtype=torch.float32, device=frames.device)
    grid = triton.cdiv(count, BLOCK.value), len(frames)
    _noise_kernel[grid](frames, out, key, rate, first, frames.stride(0), count, num_warps=4)
    return out
