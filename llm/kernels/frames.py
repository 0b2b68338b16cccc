"""Attention over the positions of a frame, for all rows of a depth transformer in one launch.

    program    store the key and value of one KV head of one row
               its queries × keys of the positions before, and its own ─ softmax ─ × values

A frame has at most some tens of positions, so that a program holds all keys and values of its head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.kernels.elementwise import level_for


@triton.jit(do_not_specialize=["position", "num_positions"])
def _attend_kernel(
    query: tl.tensor,
    key_value: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    position: tl.tensor,
    num_positions: tl.tensor,
    part_size: tl.tensor,
    row_size: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process one KV head of one row, whose `GROUP` queries share it."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    positions = tl.arange(0, BEFORE)
    is_before = positions < position
    mask = is_before[:, None] & is_dim[None, :]
    if LEVEL > 0:
        gdc_wait()
    place = row * row_size + head * SIZE + dims
    own_key = tl.load(key_value + place, mask=is_dim, other=0.0)
    own_value = tl.load(key_value + place + KV_HEADS * SIZE, mask=is_dim, other=0.0)
    start = cache + (row * num_positions * KV_HEADS + head) * SIZE
    places = positions[:, None] * (KV_HEADS * SIZE) + dims[None, :]
    keys = tl.load(start + places, mask=mask, other=0.0).to(tl.float32)
    values = tl.load(start + part_size + places, mask=mask, other=0.0).to(tl.float32)
    if LEVEL == 1:
        gdc_launch_dependents()
    now = start + position * (KV_HEADS * SIZE) + dims
    tl.store(now, own_key, mask=is_dim)
    tl.store(now + part_size, own_value, mask=is_dim)
    key, value = own_key.to(tl.float32), own_value.to(tl.float32)
    for g in tl.static_range(GROUP):
        number = head * GROUP + g
        q = tl.load(query + row * row_size + number * SIZE + dims, mask=is_dim, other=0.0)
        q = q.to(tl.float32) * scale
        own_score = tl.sum(q * key, axis=0)
        scores = tl.where(is_before, tl.sum(keys * q[None, :], axis=1), float("-inf"))
        largest = tl.maximum(tl.max(scores, axis=0), own_score)
        weights, own_weight = tl.exp(scores - largest), tl.exp(own_score - largest)
        total = tl.sum(weights, axis=0) + own_weight
        attended = tl.sum(weights[:, None] * values, axis=0) + own_weight * value
        target = out + (row * KV_HEADS * GROUP + number) * SIZE + dims
        tl.store(target, attended / total, mask=is_dim)


def attend_frame(
    query: Tensor, key_value: Tensor, cache: Tensor, position: int, *, level: int = 0
) -> Tensor:
    """Store keys and values [B, 2, Hkv, D] at a position of the cache [2, B, P, Hkv, D]; attend to
    them and those before with queries [B, H, D]; return [B, H × D].

    Queries, and keys and values, are parts of rows of the same length.
    """
    num_rows, num_heads, size = query.shape
    num_kv_heads = key_value.shape[2]
    out = query.new_empty(num_rows, num_heads * size)
    _attend_kernel[(num_rows, num_kv_heads)](
        query,
        key_value,
        cache,
        out,
        position,
        cache.shape[2],
        cache.stride(0),
        query.stride(0),
        size**-0.5,
        KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        BEFORE=triton.next_power_of_2(max(position, 1)),
        LEVEL=level_for(level, num_rows),
        num_warps=4 if position > 8 else 1,
        launch_pdl=level > 0,
    )
    return out
