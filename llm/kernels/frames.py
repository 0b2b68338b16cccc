"""Attention over the positions of a frame, for all rows of a depth transformer in one launch.

    program    add the parts of one KV head of one row, and of its queries ─ normalise ─ rotate
               store its key and value
               queries × keys of the positions before, and its own ─ softmax ─ × values

A frame has at most some tens of positions, so that a program holds all keys and values of its head.
All rows are at the same position, and have the same rotations. Positions that are known together
are processed in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for


@triton.jit
def _heads(
    line: tl.tensor,
    part_size: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Return `COUNT` heads that follow each other in memory, each the sum of its parts."""
    heads: tl.tuple = ()
    for n in tl.static_range(COUNT):
        head = line + n * SIZE + dims
        total = tl.load(head, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            total += tl.load(head + part * part_size, mask=mask, other=0.0)
        heads = heads + (total,)
    return heads


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
def _past(places: tl.tensor, is_before: tl.tensor, is_dim: tl.tensor) -> tl.tensor:
    """Load keys or values of the positions before."""
    mask = is_before[:, None] & is_dim[None, :]
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
    PARTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    COUNT: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one KV head of one row, whose `GROUP` queries share it, at `COUNT` positions."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = cache.dtype.element_ty
    dims, pairs, positions = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2), tl.arange(0, BEFORE)
    is_dim, is_pair = dims < SIZE, pairs < SIZE // 2
    first, own = head * GROUP * SIZE, (KV_HEADS * GROUP + head) * SIZE  # query, and key
    gains = _heads(gain + first, 0, dims, is_dim & HAS_GAIN, GROUP, SIZE, 1)
    key_gain = _heads(gain + own, 0, dims, is_dim & HAS_GAIN, 1, SIZE, 1)[0]
    start = cache + (row * num_positions * KV_HEADS + head) * SIZE + dims
    places = start[None, :] + positions[:, None] * (KV_HEADS * SIZE)
    for n in tl.static_range(COUNT):
        angles = rotations + position * SIZE + 2 * pairs
        cosines = tl.load(angles, mask=is_pair, other=1.0)
        sines = tl.load(angles + 1, mask=is_pair, other=0.0)
        if n > 0:
            tl.debug_barrier()  # all threads have stored the key and value before
        elif LEVEL > 0:
            gdc_wait()
        line = projected + row * ((GROUP + 2) * KV_HEADS * SIZE)
        queries = _heads(line + first, part_size, dims, is_dim, GROUP, SIZE, PARTS)
        key = _heads(line + own, part_size, dims, is_dim, 1, SIZE, PARTS)[0]
        target = out + row * (KV_HEADS * GROUP * SIZE) + first
        values = line + own + KV_HEADS * SIZE
        value = _heads(values, part_size, dims, is_dim, 1, SIZE, PARTS)[0].to(kind).to(tl.float32)
        is_before = positions < position
        past = _past(places, is_before, is_dim), _past(places + cache_part, is_before, is_dim)
        if LEVEL == 1:
            gdc_launch_dependents()
        key = _rotated(key, key_gain, cosines, sines, epsilon, kind, HAS_GAIN)
        tl.store(start + position * (KV_HEADS * SIZE), key, mask=is_dim)
        tl.store(start + cache_part + position * (KV_HEADS * SIZE), value, mask=is_dim)
        for g in tl.static_range(GROUP):
            query = _rotated(queries[g], gains[g], cosines, sines, epsilon, kind, HAS_GAIN)
            attended = _attended(query * SIZE**-0.5, key, value, past, is_before)
            tl.store(target + g * SIZE + dims, attended, mask=is_dim)
        position += 1
        row += tl.num_programs(0)


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

    With n × B rows they are of n positions: all of the first one, then all of the next, as in the
    result.
    """
    num_parts, num_lines, _ = projected.shape
    num_rows, _, num_kv_heads, size = cache.shape[1:]
    count = num_lines // num_rows
    out = cache.new_empty(num_lines, num_heads * size)
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
        PARTS=num_parts,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BEFORE=triton.next_power_of_2(max(position + count - 1, 1)),
        COUNT=count,
        HAS_GAIN=gain is not None,
        LEVEL=level_for(level, num_rows),
        num_warps=1,
        launch_pdl=level > 0,
    )
    return out
