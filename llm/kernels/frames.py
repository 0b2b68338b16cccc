"""Attention over the positions of a frame, for all rows of a depth transformer in one launch.

    program    add the parts of one KV head of one row, and of its queries ─ normalise ─ rotate
               store its key and value
               queries × keys of the positions before, and its own ─ softmax ─ × values

A frame has at most some tens of positions, so that a program holds all keys and values of its head.
All rows are at the same position, and have the same rotations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for


@triton.jit
def _head(
    projected: tl.tensor,
    part_size: tl.tensor,
    dims: tl.tensor,
    is_dim: tl.tensor,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Return the sum of the parts of one head."""
    total = tl.load(projected + dims, mask=is_dim, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(projected + part * part_size + dims, mask=is_dim, other=0.0)
    return total


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
    """Return a head, normalised if there are gains, and rotated: in the cache's numbers."""
    x = x.to(KIND).to(tl.float32)
    if HAS_GAIN:
        x = (x * tl.rsqrt(tl.sum(x * x, axis=0) + epsilon) * gains).to(KIND).to(tl.float32)
    real, imaginary = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    turned = tl.join(real * cosines - imaginary * sines, real * sines + imaginary * cosines)
    return tl.reshape(turned, (x.shape[0],)).to(KIND).to(tl.float32)


@triton.jit
def _past(places: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Load keys or values of the positions before."""
    return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _attended(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, past: tl.tuple, is_before: tl.tensor
) -> tl.tensor:
    """Return the values [D] of the own position and of the past, weighted by a query's scores."""
    own_score = tl.sum(query * key, axis=0)
    scores = tl.where(is_before, tl.sum(past[0] * query[None, :], axis=1), float("-inf"))
    largest = tl.maximum(tl.max(scores, axis=0), own_score)
    weights, own_weight = tl.exp(scores - largest), tl.exp(own_score - largest)
    total = tl.sum(weights, axis=0) + own_weight
    return (tl.sum(weights[:, None] * past[1], axis=0) + own_weight * value) / total


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
    gains: tl.tuple = ()
    for g in tl.static_range(GROUP + 1):  # queries' and the key's
        number = head * GROUP + g if g < GROUP else KV_HEADS * GROUP + head
        gains = gains + (tl.load(gain + number * SIZE + dims, is_dim & HAS_GAIN, other=0.0),)
    if LEVEL > 0:
        gdc_wait()
    line = projected + row * ((GROUP + 2) * KV_HEADS * SIZE)
    queries: tl.tuple = ()
    for g in tl.static_range(GROUP):
        own = line + (head * GROUP + g) * SIZE
        queries = queries + (_head(own, part_size, dims, is_dim, PARTS),)
    own = line + (KV_HEADS * GROUP + head) * SIZE
    key = _head(own, part_size, dims, is_dim, PARTS)
    value = _head(own + KV_HEADS * SIZE, part_size, dims, is_dim, PARTS)
    start = cache + (row * num_positions * KV_HEADS + head) * SIZE
    places = start + positions[:, None] * (KV_HEADS * SIZE) + dims[None, :]
    mask = is_before[:, None] & is_dim[None, :]
    past = _past(places, mask), _past(places + cache_part, mask)
    if LEVEL == 1:
        gdc_launch_dependents()
    key = _rotated(key, gains[GROUP], cosines, sines, epsilon, kind, HAS_GAIN)
    value = value.to(kind).to(tl.float32)
    tl.store(start + position * (KV_HEADS * SIZE) + dims, key, mask=is_dim)
    tl.store(start + cache_part + position * (KV_HEADS * SIZE) + dims, value, mask=is_dim)
    for g in tl.static_range(GROUP):
        query = _rotated(queries[g], gains[g], cosines, sines, epsilon, kind, HAS_GAIN) * scale
        attended = _attended(query, key, value, past, is_before)
        target = out + (row * KV_HEADS * GROUP + head * GROUP + g) * SIZE + dims
        tl.store(target, attended, mask=is_dim)


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
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BEFORE=triton.next_power_of_2(max(position, 1)),
        HAS_GAIN=gain is not None,
        LEVEL=level_for(level, num_rows),
        num_warps=1,
        launch_pdl=level > 0,
    )
    return out
