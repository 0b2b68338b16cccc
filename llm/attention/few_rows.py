"""Decode attention of a few rows, in one kernel: contexts are split, the last program joins them.

    program (row, KV head, split)    G query heads that share a KV head × the split's keys
        └─ maximum, sum, values ─> scratch ─> the last of a KV head's programs adds all of them up

Parts are added in the order of the splits, whichever program comes last. Where pages lie is read
from the device: a captured kernel goes on being right when page lists change. Nothing is planned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.attention.base import AttentionOptions
from llm.attention.page_lists import PageLists
from llm.kv_cache.kv_pool import KVPool

GROUP = 16  # queries of a program: a tile of a matrix unit
BLOCK = 64  # keys of a step
PROGRAMS = 132  # one for each processor of an H200
MAX_SPLITS = 16
FEW_ROWS = 2  # from here on FlashInfer's kernels are as fast
MAX_QUERIES = 8  # of a KV head: the last program holds those of all splits


@triton.jit
def _capped(scores: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """c × tanh(s / c), where tanh x = 1 − 2 / (1 + exp 2x)."""
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / SOFT_CAP))))
    return scores


@triton.jit
def _attend_part(
    group: tl.tensor,
    pages: tl.tuple,
    ids: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> tl.tuple:
    """Maximum [G], sum [G] and values [G, D] of the keys [start, end); exponents are of two."""
    keys, values, by_page, by_offset, by_head = pages
    dims = tl.arange(0, SIZE)
    largest = tl.full((group.shape[0],), -1.0e30, tl.float32)
    total = tl.zeros((group.shape[0],), tl.float32)
    summed = tl.zeros((group.shape[0], SIZE), tl.float32)
    for first in tl.range(start, end, BLOCK):
        positions = first + tl.arange(0, BLOCK)
        is_seen = positions < end
        page = tl.load(ids + positions // PAGE, mask=is_seen, other=0).to(tl.int64)
        places = page * by_page + (positions % PAGE) * by_offset + head * by_head
        places = places[:, None] + dims[None, :]
        key = tl.load(keys + places, mask=is_seen[:, None], other=0.0)
        value = tl.load(values + places, mask=is_seen[:, None], other=0.0)
        scores = _capped(tl.dot(group, tl.trans(key)) * scale, SOFT_CAP) * 1.4426950408889634
        scores = tl.where(is_seen[None, :], scores, -1.0e30)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, axis=1)
        summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None])
        largest = new_largest
    return largest, total, summed


@triton.jit
def _share(
    lists: tl.tensor,
    row: tl.tensor,
    split: tl.tensor,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """A row's page ids, and the keys [start, end) of one of its splits; see `PageLists`."""
    num_rows = tl.num_programs(0)
    first_page = tl.load(lists + row)
    num_pages = tl.load(lists + row + 1) - first_page
    context = (num_pages - 1) * PAGE + tl.load(lists + num_rows + 1 + row)
    begin = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(context - begin, BLOCK), SPLITS) * BLOCK
    start = begin + split * share
    return lists + 2 * num_rows + 1 + first_page, start, tl.minimum(start + share, context)


@triton.jit
def _decode_kernel(
    query: tl.tensor,
    pages: tl.tuple,
    lists: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    counts: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """`parts` float32 [rows, KV heads, splits, G, D + 2]; `counts` int32 [rows, KV heads], 0."""
    if LEVEL == 2:
        gdc_launch_dependents()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ids, start, end = _share(lists, row, split, PAGE, SPLITS, WINDOW, BLOCK)
    lines = tl.arange(0, GROUP)[:, None]
    dims = tl.arange(0, SIZE)[None, :]
    is_query = lines < HEADS // KV_HEADS
    if LEVEL > 0:
        gdc_wait()
    places = (head * (HEADS // KV_HEADS) + lines) * SIZE + dims
    group = tl.load(query + row * query_stride + places, mask=is_query, other=0.0)
    largest, total, summed = _attend_part(
        group, pages, ids, head, start, end, scale, SIZE, PAGE, BLOCK, SOFT_CAP
    )
    if LEVEL == 1:
        gdc_launch_dependents()
    if SPLITS == 1:
        tl.store(out + row * HEADS * SIZE + places, summed / total[:, None], mask=is_query)
    else:
        place = (row * KV_HEADS + head) * SPLITS
        mine = parts + (place + split) * GROUP * (SIZE + 2)
        _keep(mine, largest, total, summed, HEADS // KV_HEADS, GROUP, SIZE)
        tl.debug_barrier()
        count = counts + row * KV_HEADS + head
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            tl.debug_barrier()
            own = tl.arange(0, QUERIES)[:, None]
            is_own = own < HEADS // KV_HEADS
            joined = _join(parts + place * GROUP * (SIZE + 2), is_own, SPLITS, QUERIES, GROUP, SIZE)
            result = out + (row * HEADS + head * (HEADS // KV_HEADS) + own) * SIZE + dims
            tl.store(result, joined, mask=is_own)
            tl.store(count, 0)


@triton.jit
def _keep(
    part: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    summed: tl.tensor,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Values [G, D], then maxima [G], then sums [G]; of the queries that there are."""
    lines, dims = tl.arange(0, GROUP), tl.arange(0, SIZE)
    is_query = lines < QUERIES
    tl.store(part + lines[:, None] * SIZE + dims[None, :], summed, mask=is_query[:, None])
    tl.store(part + GROUP * SIZE + lines, largest, mask=is_query)
    tl.store(part + GROUP * (SIZE + 1) + lines, total, mask=is_query)


@triton.jit
def _join(
    parts: tl.tensor,
    is_query: tl.tensor,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """[QUERIES, D] of all parts. Those of other processors are read past the nearest cache."""
    lines = tl.arange(0, QUERIES)[:, None]
    places = parts + tl.arange(0, SPLITS)[None, :] * GROUP * (SIZE + 2)
    of_line = places + GROUP * SIZE + lines
    maxima = tl.load(of_line, mask=is_query, other=0.0, cache_modifier=".cg")
    sums = tl.load(of_line + GROUP, mask=is_query, other=1.0, cache_modifier=".cg")
    shares = tl.exp2(maxima - tl.max(maxima, axis=1)[:, None])
    shares /= tl.sum(sums * shares, axis=1)[:, None]
    dims = tl.arange(0, SIZE)[None, None, :]
    of_value = places[:, :, None] + lines[:, :, None] * SIZE + dims
    values = tl.load(of_value, mask=is_query[:, :, None], other=0.0, cache_modifier=".cg")
    return tl.sum(values * shares[:, :, None], axis=1)


class FewRowsDecode:
    """Attention of `num_rows` rows of one query each; scratch is its own, page lists are not."""

    def __init__(self, pool: KVPool, options: AttentionOptions, lists: PageLists) -> None:
        self._pool = pool
        self._options = options
        self._lists = lists
        rows, heads = lists.num_rows, pool.num_kv_heads
        splits = max(1, min(MAX_SPLITS, PROGRAMS // (rows * heads)))
        self._splits = 1 << (splits.bit_length() - 1)
        shape = (rows, heads, self._splits, GROUP, pool.head_dim + 2)
        self._parts = torch.empty(shape, dtype=torch.float32, device=pool.device)
        self._counts = torch.zeros(rows, heads, dtype=torch.int32, device=pool.device)

    @staticmethod
    def can_compute(pool: KVPool, options: AttentionOptions) -> bool:
        """Whether there is a kernel for such pages and heads."""
        is_wanted = options.few_rows_level is not None and pool.dtype == options.dtype
        is_power = pool.head_dim & (pool.head_dim - 1) == 0
        fits = options.num_heads // pool.num_kv_heads <= MAX_QUERIES
        return is_wanted and is_power and fits

    def attend(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        """Queries [B, H, D] of keys and values that are in the pool: [B, H × D]."""
        pool, options = self._pool, self._options
        level = options.few_rows_level or 0
        keys, values = pool.keys(layer), pool.values(layer)
        out = query.new_empty(len(query), options.num_heads * pool.head_dim)
        _decode_kernel[(len(query), pool.num_kv_heads, self._splits)](
            query,
            (keys, values, *keys.stride()[:3]),
            self._lists.numbers,
            out,
            self._parts,
            self._counts,
            pool.head_dim**-0.5,
            query.stride(0),
            HEADS=options.num_heads,
            KV_HEADS=pool.num_kv_heads,
            SIZE=pool.head_dim,
            PAGE=pool.page_size,
            QUERIES=triton.next_power_of_2(options.num_heads // pool.num_kv_heads),
            SPLITS=self._splits,
            WINDOW=window or 0,
            SOFT_CAP=options.soft_cap or 0.0,
            GROUP=GROUP,
            BLOCK=BLOCK,
            LEVEL=level,
            num_warps=4,
            launch_pdl=level > 0,
        )
        return out
