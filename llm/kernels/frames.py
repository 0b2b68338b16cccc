"""Attention over the positions of a frame, for all rows of a depth transformer in one launch.

    program    add the parts of one KV head of one row, and of its queries ─ normalise ─ rotate
               store its key and value
               queries × keys of the positions before, and its own ─ softmax ─ × values

A frame has at most some tens of positions, so that a program holds all keys and values of its head.
Those of the positions before are loaded before the predecessor has ended: between two positions of
a frame there has to be a kernel that starts no other one before its own predecessor has ended. All
rows are at the same position, and have the same rotations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for

WARP_NUMBERS = 2048  # of keys, and as many of values


@triton.jit
def _rotated(
    x: tl.tensor,
    gains: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    epsilon: tl.tensor,
    KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr,
) -> tl.tensor:
    """Return heads [H, D], normalised if there are gains, and rotated: in the cache's numbers."""
    if HAS_GAIN:
        scales = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) + epsilon)
        x = (x * scales * gains).to(KIND).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    turned = tl.join(real * cosines - imaginary * sines, real * sines + imaginary * cosines)
    return tl.reshape(turned, x.shape).to(KIND).to(tl.float32)


@triton.jit
def _numbers(
    head: tl.tensor, lines: tl.tensor, KV_HEADS: tl.constexpr, GROUP: tl.constexpr
) -> tl.tensor:
    """Return the numbers of a KV head's queries, key and value among the projected heads."""
    others = KV_HEADS * tl.maximum(lines, GROUP) + head
    return tl.where(lines < GROUP, head * GROUP + lines, others)


@triton.jit
def _line(x: tl.tensor, lines: tl.tensor, line: tl.constexpr) -> tl.tensor:
    """Return a row of x [H, D]."""
    return tl.sum(tl.where((lines == line)[:, None], x, 0.0), axis=0)


@triton.jit
def _attended(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, past: tl.tuple, is_before: tl.tensor
) -> tl.tensor:
    """Return the values [D] of the own position and of the past, weighted by a query's scores."""
    own_score = tl.sum(query * key, axis=0)
    products = past[0].to(tl.float32) * query[None, :]
    scores = tl.where(is_before, tl.sum(products, axis=1), float("-inf"))
    largest = tl.maximum(tl.max(scores, axis=0), own_score)
    weights, own_weight = tl.exp(scores - largest), tl.exp(own_score - largest)
    total = tl.sum(weights, axis=0) + own_weight
    values = tl.sum(weights[:, None] * past[1].to(tl.float32), axis=0)
    return (values + own_weight * value) / total


@triton.jit(do_not_specialize=["position", "num_positions"])
def _attend_kernel(
    projected: tl.tensor,
    rotations: tl.tensor,
    gain: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    position: tl.tensor,
    num_positions: tl.tensor,
    part_size: tl.tensor,
    cache_part: tl.tensor,
    epsilon: tl.tensor,
    scale: tl.tensor,
    PARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one KV head of one row, whose `GROUP` queries share it."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = cache.dtype.element_ty
    dims, pairs, positions = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2), tl.arange(0, BEFORE)
    is_dim, is_pair, is_before = dims < SIZE, pairs < SIZE // 2, positions < position
    angles = rotations + position * SIZE + 2 * pairs
    cosines = tl.load(angles, mask=is_pair, other=1.0)
    sines = tl.load(angles + 1, mask=is_pair, other=0.0)
    lines = tl.arange(0, HEADS)  # queries, the key, the value
    is_rotated = lines <= GROUP
    own = _numbers(head, lines, KV_HEADS, GROUP)[:, None] * SIZE + dims[None, :]
    gains = tl.load(gain + own, (is_rotated[:, None] & is_dim[None, :]) & HAS_GAIN, other=0.0)
    start = cache + (row * num_positions * KV_HEADS + head) * SIZE
    places = start + positions[:, None] * (KV_HEADS * SIZE) + dims[None, :]
    mask = is_before[:, None] & is_dim[None, :]
    past = tl.load(places, mask, other=0.0), tl.load(places + cache_part, mask, other=0.0)
    if LEVEL > 0:
        gdc_wait()
    own += row * ((GROUP + 2) * KV_HEADS * SIZE)
    mask = (lines < GROUP + 2)[:, None] & is_dim[None, :]
    x = tl.load(projected + own, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(projected + part * part_size + own, mask, other=0.0)
    if LEVEL == 1:
        gdc_launch_dependents()
    x = x.to(kind).to(tl.float32)
    turned = _rotated(x, gains, cosines[None, :], sines[None, :], epsilon, kind, HAS_GAIN)
    x = tl.where(is_rotated[:, None], turned, x)
    target = start + position * (KV_HEADS * SIZE) + dims[None, :]
    parts = tl.where(lines > GROUP, cache_part, 0)
    tl.store(target + parts[:, None], x, mask=mask & (lines >= GROUP)[:, None])
    key, value = _line(x, lines, GROUP), _line(x, lines, GROUP + 1)
    for g in tl.static_range(GROUP):
        attended = _attended(_line(x, lines, g) * scale, key, value, past, is_before)
        target = out + (row * KV_HEADS * GROUP + head * GROUP + g) * SIZE + dims
        tl.store(target, attended, mask=is_dim)


def warps_for(position: int, size: int) -> int:
    """Return the warps of a program, whose registers hold the keys and values of a head."""
    keys = triton.next_power_of_2(max(position, 1)) * triton.next_power_of_2(size)
    return max(1, keys // WARP_NUMBERS)


def attend_frame(
    projected: Tensor,
    rotations: Tensor,
    cache: Tensor,
    position: int,
    *,
    num_heads: int,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    level: int = 0,
) -> Tensor:
    """Attend with queries at a position of a frame to its keys and those before; return [B, H × D].

    The sum over S of projected [S, B, (H + 2 × Hkv) × D] has queries, keys and values. Queries and
    keys are normalised with a gain float32 [H + Hkv, D], and rotated by row `position` of
    rotations complex64 [P, D/2]; keys and values are stored in the cache [2, B, P, Hkv, D].
    """
    num_parts, num_rows, _ = projected.shape
    num_kv_heads, size = cache.shape[3:]
    out = cache.new_empty(num_rows, num_heads * size)
    _attend_kernel[(num_rows, num_kv_heads)](
        projected,
        torch.view_as_real(rotations),
        projected if gain is None else gain,
        cache,
        out,
        position,
        cache.shape[2],
        projected.stride(0),
        cache.stride(0),
        epsilon,
        size**-0.5,
        PARTS=num_parts,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEADS=triton.next_power_of_2(num_heads // num_kv_heads + 2),
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BEFORE=triton.next_power_of_2(max(position, 1)),
        HAS_GAIN=gain is not None,
        LEVEL=level_for(level, num_rows),
        num_warps=warps_for(position, size),
        launch_pdl=level > 0,
    )
    return out
