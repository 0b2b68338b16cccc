"""Decode attention of a few rows in one kernel: contexts are split, then merged.

    program (row, KV head, split)    G query heads that share a KV head × the split's keys
        └─ maximum, sum, values ─> scratch ─> the last program of a KV head adds them up

Parts are added in the order of the splits, whichever program ends last. Page ids are read
from the device, so that a captured kernel follows changes of page lists. There is no plan.
Float8 keys and values are multiplied in float16, which holds every number of float8.
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

GROUP = 16  # queries of a program: one tile of a matrix unit
BLOCK = 32  # keys of a step: so small that a processor has room for programs of products, too
PROGRAMS = 264  # of up to two rows: two per processor of an H200
MAX_SPLITS = 32
MAX_JOINED = 16_384  # maximum number of values that the last program of a KV head holds
FEW_ROWS = 4  # more rows, and rows next to prompts, are those of `ManyRowsDecode`
MAX_QUERIES = 16  # heads that share a KV head


def can_compute(pool: KVPool, options: AttentionOptions) -> bool:
    """Whether the kernels of a few rows and of many rows are wanted, and support the pool's pages
    and heads.
    """
    is_wanted = options.decode_level is not None and not options.batch_invariant
    is_known = pool.dtype == options.dtype or pool.kernels_take_float8
    is_power = pool.head_dim & (pool.head_dim - 1) == 0
    fits = options.num_heads // pool.num_kv_heads <= MAX_QUERIES
    return is_wanted and is_known and is_power and fits


@triton.jit
def capped(scores: tl.tensor, SOFT_CAP: tl.constexpr) -> tl.tensor:
    """Return c × tanh(s / c), where tanh x = 1 − 2 / (1 + exp 2x)."""
    if SOFT_CAP > 0:
        scores = SOFT_CAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / SOFT_CAP))))
    return scores


@triton.jit
def _load_tile(
    pages: tl.tuple,
    ids: tl.tensor,
    head: tl.tensor,
    positions: tl.tensor,
    mask: tl.tensor,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
) -> tl.tuple:
    """Load keys and values [N, D] at `positions` of a row; 0 where they are masked."""
    keys, values, by_page, by_offset, by_head = pages
    page = tl.load(ids + positions // PAGE, mask=mask, other=0).to(tl.int64)
    places = page * by_page + (positions % PAGE) * by_offset + head.to(tl.int64) * by_head
    places = places[:, None] + tl.arange(0, SIZE)[None, :]
    key = tl.load(keys + places, mask=mask[:, None], other=0.0)
    return key, tl.load(values + places, mask=mask[:, None], other=0.0)


@triton.jit
def _attend_tile(
    group: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    is_seen: tl.tensor,
    state: tl.tuple,
    scale: tl.tensor,
    SOFT_CAP: tl.constexpr,
) -> tl.tuple:
    """Return the state after another tile: maximum [G], sum [G], values [G, D]; exponents have base
    two.
    """
    largest, total, summed = state
    scores = capped(tl.dot(group, tl.trans(key)) * scale, SOFT_CAP) * 1.4426950408889634
    scores = tl.where(is_seen[None, :], scores, -1.0e30)
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, axis=1)
    summed = tl.dot(weights.to(value.dtype), value, summed * shrink[:, None])
    return new_largest, total, summed


@triton.jit
def _split_keys(
    lists: tl.tensor,
    row: tl.tensor,
    split: tl.tensor,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return a row's page ids, the keys [start, end) of one of its splits, its context, and the
    number of its splits that have keys.
    """
    num_rows = tl.num_programs(0)
    first_page = tl.load(lists + row)
    num_pages = tl.load(lists + row + 1) - first_page
    context = (num_pages - 1) * PAGE + tl.load(lists + num_rows + 1 + row)
    begin = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(context - begin, BLOCK), SPLITS) * BLOCK
    start = begin + split * share
    ids = lists + 2 * num_rows + 1 + first_page
    num_splits = tl.cdiv(context - begin, share)
    return ids, start, tl.minimum(start + share, context), context, num_splits


@triton.jit
def _attend_split(
    queries: tl.tensor,
    is_query: tl.tensor,
    pages: tl.tuple,
    share: tl.tuple,
    head: tl.tensor,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
) -> tl.tuple:
    """Return the state after all keys of a split, for the queries [G, D] at `queries`.

    All keys but the newest were stored before this step: their first tile is loaded before the
    kernel waits for its predecessor, which stores the newest.
    """
    ids, start, end, context, _ = share
    positions = start + tl.arange(0, BLOCK)
    is_new = (positions == context - 1) & (positions < end)
    is_old = (positions < end) & (positions < context - 1)
    key, value = _load_tile(pages, ids, head, positions, is_old, SIZE, PAGE)
    if LEVEL == 2:
        gdc_wait()
    group = tl.load(queries, mask=is_query, other=0.0)
    form: tl.constexpr = tl.float16 if pages[0].dtype.element_ty == tl.float8e4nv else group.dtype
    group = group.to(form)
    new_key, new_value = _load_tile(pages, ids, head, positions, is_new, SIZE, PAGE)
    key = tl.where(is_new[:, None], new_key.to(form), key.to(form))
    value = tl.where(is_new[:, None], new_value.to(form), value.to(form))
    state = (
        tl.full((GROUP,), -1.0e30, tl.float32),
        tl.zeros((GROUP,), tl.float32),
        tl.zeros((GROUP, SIZE), tl.float32),
    )
    state = _attend_tile(group, key, value, positions < end, state, scale, SOFT_CAP)
    for first in tl.range(start + BLOCK, end, BLOCK):
        others = first + tl.arange(0, BLOCK)
        key, value = _load_tile(pages, ids, head, others, others < end, SIZE, PAGE)
        key, value = key.to(form), value.to(form)
        state = _attend_tile(group, key, value, others < end, state, scale, SOFT_CAP)
    return state


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
    """Compute decode attention.

    `parts` float32 [rows, KV heads, splits, G, D + 2]; `counts` int32 [rows, KV heads], 0.
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    if LEVEL == 1:
        gdc_wait()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    share = _split_keys(lists, row, split, PAGE, SPLITS, WINDOW, BLOCK)
    num_splits = share[4]
    if split >= num_splits:
        return
    lines, dims = tl.arange(0, GROUP)[:, None], tl.arange(0, SIZE)[None, :]
    is_query = lines < HEADS // KV_HEADS
    places = (head * (HEADS // KV_HEADS) + lines) * SIZE + dims
    queries = query + row * query_stride + places
    state = _attend_split(
        queries, is_query, pages, share, head, scale, SIZE, PAGE, SOFT_CAP, GROUP, BLOCK, LEVEL
    )
    if LEVEL == 1:
        gdc_launch_dependents()
    if num_splits == 1:
        tl.store(out + row * HEADS * SIZE + places, state[2] / state[1][:, None], mask=is_query)
    else:
        mine = parts + ((row * KV_HEADS + head) * SPLITS + split) * GROUP * (SIZE + 2)
        keep(mine, state, HEADS // KV_HEADS, GROUP, GROUP, SIZE)
        tl.debug_barrier()
        count = counts + row * KV_HEADS + head
        if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.debug_barrier()
            all_parts = parts + (row * KV_HEADS + head) * SPLITS * GROUP * (SIZE + 2)
            result = out + (row * HEADS + head * (HEADS // KV_HEADS)) * SIZE
            heads: tl.constexpr = HEADS // KV_HEADS
            _join(all_parts, result, num_splits, heads, SPLITS, QUERIES, GROUP, SIZE)
            tl.store(count, 0)


@triton.jit
def keep(
    part: tl.tensor,
    state: tl.tuple,
    HEADS: tl.constexpr,
    ROOM: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Store values [Q, D], then maxima [Q], then sums [Q] of the first `HEADS` of the group's
    queries; Q is `ROOM`.
    """
    largest, total, summed = state
    lines, dims = tl.arange(0, GROUP), tl.arange(0, SIZE)
    is_query = lines < HEADS
    tl.store(part + lines[:, None] * SIZE + dims[None, :], summed, mask=is_query[:, None])
    tl.store(part + ROOM * SIZE + lines, largest, mask=is_query)
    tl.store(part + ROOM * (SIZE + 1) + lines, total, mask=is_query)


@triton.jit
def _join(
    parts: tl.tensor,
    result: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Store the sum [HEADS, D] of all parts. Loads bypass the nearest cache, because other
    processors wrote them.
    """
    lines, splits = tl.arange(0, QUERIES)[:, None], tl.arange(0, SPLITS)[None, :]
    is_query = lines < HEADS
    is_part = is_query & (splits < num_splits)
    places = parts + splits * GROUP * (SIZE + 2)
    of_line = places + GROUP * SIZE + lines
    maxima = tl.load(of_line, mask=is_part, other=-1.0e30, cache_modifier=".cg")
    sums = tl.load(of_line + GROUP, mask=is_part, other=1.0, cache_modifier=".cg")
    shares = tl.exp2(maxima - tl.max(maxima, axis=1)[:, None])
    shares /= tl.sum(sums * shares, axis=1)[:, None]
    dims = tl.arange(0, SIZE)
    of_value = places[:, :, None] + lines[:, :, None] * SIZE + dims[None, None, :]
    values = tl.load(of_value, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
    joined = tl.sum(values * shares[:, :, None], axis=1)
    tl.store(result + lines * SIZE + dims[None, :], joined, mask=is_query)


class FewRowsDecode:
    """Attention of `num_rows` rows of one query each. It owns its scratch, but not the page
    lists.
    """

    def __init__(self, pool: KVPool, options: AttentionOptions, lists: PageLists) -> None:
        self._pool = pool
        self._options = options
        self._lists = lists
        rows, heads = lists.num_rows, pool.num_kv_heads
        self._queries = triton.next_power_of_2(options.num_heads // heads)
        most = min(MAX_SPLITS, MAX_JOINED // (self._queries * pool.head_dim))
        splits = max(1, min(most, PROGRAMS // (min(rows, 2) * heads)))
        self._splits = 1 << (splits.bit_length() - 1)
        shape = (rows, heads, self._splits, GROUP, pool.head_dim + 2)
        self._parts = torch.empty(shape, dtype=torch.float32, device=pool.device)
        self._counts = torch.zeros(rows, heads, dtype=torch.int32, device=pool.device)

    def attend(self, layer: int, query: Tensor, window: int | None) -> Tensor:
        """Attend with queries [B, H, D] to keys and values in the pool; return [B, H × D]."""
        pool, options = self._pool, self._options
        level = options.decode_level or 0
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
            QUERIES=self._queries,
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
