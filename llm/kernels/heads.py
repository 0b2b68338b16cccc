"""Queries, keys and values of any number of rows: normalised, rotated and stored in one kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.batch import KVSlots
from llm.kernels.elementwise import level_for
from llm.kernels.launches import Launches, power_above

BLOCK_VALUES = 1024  # values per program


@triton.jit
def rotate_pairs(x: tl.tensor, angles: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Rotate [..., 2] neighbours by the complex numbers at `angles`; masked ones are unchanged."""
    real, imaginary = tl.split(x)
    cosine = tl.load(angles, mask=mask, other=1.0)
    sine = tl.load(angles + 1, mask=mask, other=0.0)
    return tl.join(real * cosine - imaginary * sine, real * sine + imaginary * cosine)


@triton.jit
def store_heads(
    x: tl.tensor,
    pages: tl.tuple,
    token: tl.tensor,
    heads: tl.tensor,
    dims: tl.tensor,
    mask: tl.tensor,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:
    """Store values of a token in its slot: keys, from head `KV_HEADS` on values.

    `pages` are those of `pages_of`; heads below 0 are skipped.
    """
    keys, values, slots, by_page, by_offset, by_head = pages
    slot = tl.load(slots + token)
    place = (slot // PAGE) * by_page + (slot % PAGE) * by_offset + dims
    key = heads.to(tl.int64)
    tl.store(keys + place + key * by_head, x, mask=mask & (key >= 0) & (key < KV_HEADS))
    value = key - KV_HEADS
    tl.store(values + place + value * by_head, x, mask=mask & (value >= 0) & (value < KV_HEADS))


def pages_of(target: KVSlots) -> tuple[Any, ...]:
    """Return the arguments of `store_heads`."""
    return (*target, *target.keys.stride()[:3])


@triton.jit
def _heads_kernel(
    projected: tl.tensor,
    rotations: tl.tensor,
    gain: tl.tensor,
    factors: tl.tuple,
    pages: tl.tuple,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    STORES: tl.constexpr,
    IS_SCALED: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Process `BLOCK_HEADS` of one token's queries, keys and values. `factors`: the scales of
    tokens and of values, if they are scaled.
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    mask = (heads < HEADS + 2 * KV_HEADS) & (dims < SIZE)
    is_rotated = heads < HEADS + KV_HEADS
    if LEVEL > 0:
        gdc_wait()
    places = projected + (token * (HEADS + 2 * KV_HEADS) + heads) * SIZE + dims
    x = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    if IS_SCALED:
        scales = tl.load(factors[1] + heads * SIZE + dims, mask=mask, other=0.0)
        x = x * scales * tl.load(factors[0] + token)
        x = x.to(projected.dtype.element_ty).to(tl.float32)
    if HAS_GAIN:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) + epsilon)[:, None]
        gains = tl.load(gain + heads * SIZE + dims, mask=mask & is_rotated, other=0.0)
        normed = (x * scale * gains).to(projected.dtype.element_ty).to(tl.float32)
        x = tl.where(is_rotated, normed, x)
    pairs = tl.arange(0, BLOCK // 2)[None, :]
    x = rotate_pairs(
        tl.reshape(x, (BLOCK_HEADS, BLOCK // 2, 2)),
        rotations + token * SIZE + pairs * 2,
        is_rotated & (pairs < SIZE // 2),
    )
    x = tl.reshape(x, (BLOCK_HEADS, BLOCK))
    if LEVEL == 1:
        gdc_launch_dependents()
    changed = heads < HEADS if STORES else is_rotated | IS_SCALED
    tl.store(places, x, mask=mask & changed)
    if STORES:
        store_heads(x, pages, token, heads - HEADS, dims, mask, KV_HEADS, PAGE)


def rotate_heads(
    projected: Tensor,
    rotations: Tensor,
    target: KVSlots | None,
    *,
    num_heads: int,
    gain: Tensor | None = None,
    epsilon: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
    level: int = 0,
) -> None:
    """Normalise, rotate and store [T, H + 2 × Hkv, D] queries, keys and values. With `scales`
    float32 [T] and [(H + 2 × Hkv) × D] they are those of a `ScaledProduct`.

    `rotations` complex64 [T, 1, D/2]; `gain` float32 [H + Hkv, D]. Queries are rotated in place.
    Keys and values are stored in their slots in `target` only; without a target keys are rotated in
    place, too.
    """
    num_tokens, all_heads, size = projected.shape
    level = level_for(level, num_tokens)
    block = power_above(size)
    block_heads = max(1, min(power_above(all_heads), BLOCK_VALUES // block))
    angles = torch.view_as_real(rotations)
    constants = (
        num_heads,
        (all_heads - num_heads) // 2,
        size,
        block,
        block_heads,
        1 if target is None else target.keys.shape[1],
        gain is not None,
        target is not None,
        scales is not None,
        level,
    )
    _launch_heads(
        (num_tokens, -(-all_heads // block_heads), 1),
        (
            projected,
            angles,
            angles if gain is None else gain,
            (angles, angles) if scales is None else scales,
            () if target is None else pages_of(target),
            epsilon,
        ),
        constants,
        num_warps=4,
        is_early=level > 0,
    )


_launch_heads = Launches(_heads_kernel)
