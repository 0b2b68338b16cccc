"""Queries, keys and values of a few rows in one kernel: norm, product, rotation, store.

    x ─norm─ × Wᵀ (+ bias) ─┬─ queries ─rotated─> out [T, H, D]
                            ├─ keys ────rotated─> their slots of the pool
                            └─ values ──────────> their slots of the pool

The values of a rotated pair are neighbours, so that they are in one tile of the matrix.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels.blocks import Blocks
from llm.kernels.heads import pages_of, rotate_pairs, store_heads
from llm.kernels.products import launch_few_rows


@triton.jit
def _put_heads(
    products: tl.tuple,
    values: tl.tuple,
    tile: tl.tensor,
    t: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    OPTIONS: tl.constexpr,
) -> None:
    """Rotate and store the products. `values`: query, bias, rotations, pages.

    `OPTIONS`: whether there is a bias, number of query heads, of key heads, their size, tokens of a
    page.
    """
    query, bias, rotations, pages = values
    HEADS: tl.constexpr = OPTIONS[1]
    KV_HEADS: tl.constexpr = OPTIONS[2]
    SIZE: tl.constexpr = OPTIONS[3]
    columns = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = t < num_rows
    y = products[0]
    if OPTIONS[0]:
        y += tl.load(bias + columns, mask=columns < num_out, other=0.0).to(tl.float32)
    y = y.to(query.dtype.element_ty).to(tl.float32)
    pairs = tile * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
    y = rotate_pairs(
        tl.reshape(y, (BLOCK_OUT // 2, 2)),
        rotations + t * SIZE + pairs % (SIZE // 2) * 2,
        is_row & (pairs < (HEADS + KV_HEADS) * (SIZE // 2)),
    )
    y = tl.reshape(y, (BLOCK_OUT,))
    heads = columns // SIZE
    tl.store(query + t * HEADS * SIZE + columns, y, mask=is_row & (heads < HEADS))
    if is_row:
        everywhere = columns < num_out
        store_heads(y, pages, t, heads - HEADS, columns % SIZE, everywhere, KV_HEADS, OPTIONS[4])


def project_heads(
    x: Tensor,
    weight: Tensor,
    rotations: Tensor,
    target: KVSlots,
    blocks: Blocks,
    *,
    gain: Tensor,
    epsilon: float,
    num_heads: int,
    scales: Tensor | None = None,
    bias: Tensor | None = None,
    level: int = 0,
) -> Tensor:
    """Return rotated queries [T, H, D] of x [T, K]; store keys and values in their slots.

    `weight` [(H + 2 × Hkv) × D, K], `rotations` complex64 [T, 1, D/2]; x is normalised. With
    `scales` the matrix and x are float8 as in `launch_few_rows`.
    """
    _, page_size, num_kv_heads, size = target.keys.shape
    query = x.new_empty(len(x), num_heads, size)
    values = (
        query,
        x if bias is None else bias,
        torch.view_as_real(rotations),
        pages_of(target),
    )
    options = (int(bias is not None), num_heads, num_kv_heads, size, page_size)
    launch_few_rows(
        x,
        weight,
        blocks,
        _put_heads,
        values,
        options,
        scales=scales,
        gain=gain,
        epsilon=epsilon,
        level=level,
    )
    return query
