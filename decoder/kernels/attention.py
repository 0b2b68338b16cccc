"""A Triton kernel: attention of every code of a window to all others, or to those it may see.

Imported only where there is a GPU; the reference is scaled_dot_product_attention with the bias of
`PaddedRows`. It reads queries, keys and values where one product has written them. Products of
float32 have three parts, which are as precise; those of float16 are summed in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from decoder.kernels.spans import own_columns, span_arguments
from decoder.window_inputs import PaddedRows

MIN_TILE = 16
KEYS = tl.constexpr(32)
LOWEST = tl.constexpr(-1e30)
"""The score of a masked pair; unlike -inf, two of them have a difference."""


@triton.jit
def _attention_kernel(
    qkv: tl.tensor,  # [B, T, 3, H, D]
    out: tl.tensor,  # [B, T, H, D]
    span: tl.tuple,
    ranks: tl.tuple,  # of a masked call: sees, ranks and the stride of their rows
    sizes: tl.tuple,  # of a head, columns
    scale: tl.tensor,  # of scores as powers of two
    DIM: tl.constexpr,  # a power of two
    QUERIES: tl.constexpr,
) -> None:
    """Program (q, h, b): one block of queries of one head of one row."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    dim, length = sizes
    inner = tl.num_programs(1) * dim
    first, last = own_columns(span, row, length)
    d = tl.arange(0, DIM)[None]
    i = block * QUERIES + tl.arange(0, QUERIES)
    source = qkv + row * length * 3 * inner + head * dim + d
    is_query = (i[:, None] < length) & (d < dim)
    query = tl.load(source + i[:, None] * 3 * inner, mask=is_query, other=0.0)
    highest = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(first // KEYS * KEYS, last, KEYS):
        j = start + tl.arange(0, KEYS)
        own = (j >= first) & (j < last)
        place = source + inner + j[:, None] * 3 * inner
        keys = tl.load(place, mask=own[:, None] & (d < dim), other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3") * scale
        seen = own[None]
        if len(ranks) == 3:
            sees, rank, stride = ranks
            above = tl.load(sees + row * stride + i, mask=i < length, other=0)
            below = tl.load(rank + row * stride + j, mask=own, other=0)
            seen &= above[:, None] >= below[None]
        scores = tl.where(seen, scores, LOWEST)
        former = highest
        highest = tl.maximum(former, tl.max(scores, axis=1))
        shares = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0)
        fading = tl.exp2(former - highest)
        total = total * fading + tl.sum(shares, axis=1)
        values = tl.load(place + inner, mask=own[:, None] & (d < dim), other=0.0)
        mixed = mixed * fading[:, None]
        mixed += tl.dot(shares.to(values.dtype), values, input_precision="tf32x3")
    target = out + (row * length + i[:, None]) * inner + head * dim + d
    tl.store(target, mixed / tl.maximum(total, 1e-30)[:, None], mask=is_query)


def attend(qkv: Tensor, num_heads: int, rows: PaddedRows) -> Tensor:
    """Return [B, T, H D] for contiguous qkv [B, T, 3 H D] of the same type, float32 or float16;
    padding is undefined.
    """
    assert qkv.is_contiguous()
    count, length, width = qkv.shape
    dim = width // 3 // num_heads
    out = qkv.new_empty(count, length, width // 3)
    queries = MIN_TILE if length <= MIN_TILE else 2 * MIN_TILE
    _attention_kernel[triton.cdiv(length, queries), num_heads, count](
        qkv,
        out,
        span_arguments(rows.own),
        _rank_arguments(rows),
        (dim, length),
        dim**-0.5 * 1.4426950408889634,
        DIM=max(MIN_TILE, triton.next_power_of_2(dim)),
        QUERIES=queries,
        num_warps=4,
    )
    return out


def _rank_arguments(rows: PaddedRows) -> tuple[Any, ...]:
    sees, ranks = rows.sees, rows.ranks
    if sees is None or ranks is None:
        return ()
    assert sees.stride() == ranks.stride()
    assert sees.stride(1) == 1
    return sees, ranks, sees.stride(0)
