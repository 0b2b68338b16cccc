"""Decode attention of many rows, and of rows next to prompts: long contexts are split, then merged.

    program (row, KV head, split)    G query heads that share a KV head × the split's keys
        ├─ only split of its context ──> out
        └─ maximum, sum, values ─> scratch ─> the last program of a context adds them up

No program waits for another. A split has at least `SPLIT_KEYS` keys and a long context several, so
that contexts of any lengths occupy the device evenly. Parts are added in the order of the splits,
whichever program ends last. There is no plan: page ids and lengths are read from the device.

Float8 keys and values are read in pairs of neighbouring dimensions, which are one number of 16 bits
for the matrix unit's loads. First numbers and second numbers of all pairs are multiplied apart, in
float16, which holds every number of float8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from llm.attention.base import AttentionOptions
from llm.attention.few_rows import FEW_ROWS, capped, keep
from llm.attention.page_lists import PageLists
from llm.attention.workspaces import MAX_SPLITS
from llm.kv_cache.kv_pool import KVPool

GROUP = 16  # queries of a program: one tile of a matrix unit
BLOCK = 64  # keys of a step
STAGES = 3  # steps whose keys are being read
NUM_WARPS = 4
SMALL_HEAD = 64  # with heads up to this size: as many warps as a number of the pool has bytes
SPLIT_KEYS = 512  # of a split, at least
FULL_ROWS = 64  # whose programs occupy the device: from so many on a split has twice as many keys
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
CONVERT = """{{
.reg .b32 both;
.reg .b16 low, high;
prmt.b32 both, $1, 0, {places};
mov.b32 {{low, high}}, both;
cvt.rn.f16x2.e4m3x2 $0, low;
}}"""
FIRST_HALVES = tl.constexpr(CONVERT.format(places="0x4420"))
SECOND_HALVES = tl.constexpr(CONVERT.format(places="0x4431"))


@triton.jit
def _half(pairs: tl.tensor, SECOND: tl.constexpr) -> tl.tensor:
    """Return the first or the second float8 number of each pair in float16."""
    if IS_INTERPRETED:
        byte = (pairs >> 8 if SECOND else pairs & 0xFF).to(tl.uint8)
        half = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Of two pairs in a register: their bytes side by side, converted at once.
        half = tl.inline_asm_elementwise(
            SECOND_HALVES if SECOND else FIRST_HALVES,
            "=r,r",
            [pairs],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    return half


@triton.jit
def _parts_of(values: tl.tensor, PARTS: tl.constexpr) -> tl.tuple:
    """Return what a matrix unit multiplies: the values, or the halves of float8 pairs."""
    parts: tl.tuple = (values,)
    if PARTS == 2:
        parts = (_half(values, False), _half(values, True))
    return parts


@triton.jit
def _tile(
    ids: tl.tensor,
    first: tl.tensor,
    lines: tl.tensor,
    is_seen: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return the slots of the keys from `first` on: a number, and what to add to it [BLOCK]."""
    if PAGE % BLOCK == 0:  # all are in one page
        page = tl.load(ids + first // PAGE).to(tl.int64)
        slot, added = page * PAGE + first % PAGE, lines
    else:
        positions = first + lines
        page = tl.load(ids + positions // PAGE, mask=is_seen, other=0).to(tl.int64)
        slot, added = 0, page * PAGE + positions % PAGE
    return slot, added


@triton.jit
def _attend_block(
    group: tl.tuple,
    key: tl.tuple,
    value: tl.tuple,
    is_seen: tl.tensor,
    state: tl.tuple,
    scale: tl.tensor,
    SOFT_CAP: tl.constexpr,
) -> tl.tuple:
    """Return the state after another block of keys: maximum [G], sum [G], values of each part [G,
    D / parts]; exponents have base two.
    """
    largest, total, summed = state
    scores = tl.dot(group[0], key[0])
    for part in tl.static_range(1, len(group)):
        scores = tl.dot(group[part], key[part], scores)
    scores = capped(scores * scale, SOFT_CAP) * 1.4426950408889634
    scores = tl.where(is_seen[None, :], scores, -1.0e30)
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_largest[:, None])
    shrink = tl.exp2(largest - new_largest)
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(value[0].dtype)
    sums: tl.tuple = ()
    for part in tl.static_range(len(group)):
        sums = sums + (tl.dot(weights, value[part], summed[part] * shrink[:, None]),)
    return new_largest, total, sums


@triton.jit
def _attend_split(
    queries: tl.tensor,
    is_query: tl.tensor,
    pages: tl.tuple,
    share: tl.tuple,
    scale: tl.tensor,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    SEEN: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tuple:
    """Return the state after the keys of a split: maximum [G], sum [G], values [G, D]. `queries`
    [G, 1] are the places of each query's first value.
    """
    keys, values = pages
    ids, start, end, oldest = share
    PAGE: tl.constexpr = KEYS[0]
    PARTS: tl.constexpr = KEYS[1]
    BLOCK: tl.constexpr = KEYS[2]
    WIDTH: tl.constexpr = SIZE // PARTS
    dims, lines = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    query = tl.load(queries + tl.arange(0, SIZE)[None, :], mask=is_query, other=0.0)
    group: tl.tuple = (query,)
    if PARTS == 2:
        group = tl.split(tl.reshape(query.to(tl.float16), (GROUP, WIDTH, 2)))
    summed: tl.tuple = ()
    for _ in tl.static_range(PARTS):
        summed = summed + (tl.zeros((GROUP, WIDTH), tl.float32),)
    state = (tl.full((GROUP,), -1.0e30, tl.float32), tl.zeros((GROUP,), tl.float32), summed)
    for first in tl.range(start, end, BLOCK, num_stages=KEYS[3]):
        is_seen = first + lines < end
        if SEEN[0] > 0:
            is_seen = is_seen & (first + lines >= oldest)
        slot, added = _tile(ids, first, lines, is_seen, PAGE, BLOCK)
        # Keys are read as columns, as the matrix unit takes them.
        column = keys + slot * WIDTH + added[None, :] * WIDTH
        key = tl.load(column + dims[:, None], mask=is_seen[None, :], other=0)
        line = values + slot * WIDTH + added[:, None] * WIDTH
        value = tl.load(line + dims[None, :], mask=is_seen[:, None], other=0)
        parts = (_parts_of(key, PARTS), _parts_of(value, PARTS))
        state = _attend_block(group, parts[0], parts[1], is_seen, state, scale, SEEN[1])
    largest, total, summed = state
    found = summed[0]
    if PARTS == 2:
        found = tl.reshape(tl.join(found, summed[1]), (GROUP, SIZE))
    return largest, total, found


@triton.jit
def _share_of(
    lists: tl.tensor,
    num_rows: tl.tensor,
    row: tl.tensor,
    split: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tuple:
    """Return a row's page ids, the keys [start, end) of one of its splits, the oldest key that the
    row sees, and the number of splits.
    """
    first_page = tl.load(lists + row)
    num_pages = tl.load(lists + row + 1) - first_page
    context = (num_pages - 1) * PAGE + tl.load(lists + num_rows + 1 + row)
    oldest = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
    begin = oldest // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(context - begin, SPLITS[0]), BLOCK) * BLOCK
    share = tl.maximum(share, SPLITS[1])
    start = begin + split * share
    ids = lists + 2 * num_rows + 1 + first_page
    num_splits = tl.cdiv(context - begin, share)
    return ids, start, tl.minimum(start + share, context), oldest, num_splits


@triton.jit
def _join(
    parts: tl.tensor,
    result: tl.tensor,
    num_splits: tl.tensor,
    heads: tl.tensor,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Store the sum [heads, D] of all parts. Loads bypass the nearest cache, because other
    processors wrote them.
    """
    lines, dims = tl.arange(0, QUERIES), tl.arange(0, SIZE)
    is_query = lines < heads
    places = lines[:, None] * SIZE + dims[None, :]
    largest = tl.full((QUERIES,), -1.0e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    summed = tl.zeros((QUERIES, SIZE), tl.float32)
    for split in range(num_splits):
        part = parts + split * QUERIES * (SIZE + 2)
        of_line = part + QUERIES * SIZE + lines
        maxima = tl.load(of_line, mask=is_query, other=0.0, cache_modifier=".cg")
        sums = tl.load(of_line + QUERIES, mask=is_query, other=1.0, cache_modifier=".cg")
        values = tl.load(part + places, mask=is_query[:, None], other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, maxima)
        shrink, grow = tl.exp2(largest - new_largest), tl.exp2(maxima - new_largest)
        total = total * shrink + sums * grow
        summed = summed * shrink[:, None] + values * grow[:, None]
        largest = new_largest
    tl.store(result + places, summed / total[:, None], mask=is_query[:, None])


@triton.jit
def _add_part(
    parts: tl.tensor,
    count: tl.tensor,
    result: tl.tensor,
    state: tl.tuple,
    split: tl.tensor,
    num_splits: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Store the part of a split; the last program of a context stores the sum of all."""
    SIZE: tl.constexpr = HEADS[2]
    QUERIES: tl.constexpr = HEADS[3]
    keep(parts + split * QUERIES * (SIZE + 2), state, HEADS[0], QUERIES, GROUP, SIZE)
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
        tl.debug_barrier()
        _join(parts, result, num_splits, HEADS[0], QUERIES, SIZE)
        tl.store(count, 0)


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
    num_rows: tl.tensor,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SEEN: tl.constexpr,
    GROUP: tl.constexpr,
    LEVEL: tl.constexpr,
) -> None:
    """Compute decode attention of the first rows of `lists`, which are those of `num_rows` rows.

    `parts` float32 [rows, KV heads, splits, Q × (D + 2)]; `counts` int32 [rows, KV heads], 0.

    `HEADS`: query heads of a KV head, KV heads, their size D, room for queries Q in `parts`.
    `KEYS`: tokens of a page, numbers in a unit of the pool, keys of a step, steps whose
    keys are being read. `SPLITS`: most splits, least keys of one. `SEEN`: window and soft cap of
    the scores, or 0.
    """
    if LEVEL == 2:
        gdc_launch_dependents()
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ids, start, end, oldest, num_splits = _share_of(
        lists, num_rows, row, split, KEYS[0], KEYS[2], SPLITS, SEEN[0]
    )
    if split >= num_splits:
        return
    SIZE: tl.constexpr = HEADS[2]
    QUERIES: tl.constexpr = HEADS[3]
    lines, dims = tl.arange(0, GROUP)[:, None], tl.arange(0, SIZE)[None, :]
    is_query = lines < HEADS[0]
    first_head = (row.to(tl.int64) * HEADS[1] + head) * HEADS[0]
    queries = query + row.to(tl.int64) * query_stride + (head * HEADS[0] + lines) * SIZE
    of_head = head.to(tl.int64) * pages[2]
    heads, share = (pages[0] + of_head, pages[1] + of_head), (ids, start, end, oldest)
    if LEVEL > 0:
        gdc_wait()
    state = _attend_split(queries, is_query, heads, share, scale, SIZE, KEYS, SEEN, GROUP)
    if LEVEL == 1:
        gdc_launch_dependents()
    result = out + first_head * SIZE
    if num_splits == 1:
        tl.store(result + lines * SIZE + dims, state[2] / state[1][:, None], mask=is_query)
    else:
        place = row * HEADS[1] + head
        all_parts = parts + place * (SPLITS[0] * QUERIES * (SIZE + 2))
        _add_part(all_parts, counts + place, result, state, split, num_splits, HEADS, GROUP)


class ManyRowsDecode:
    """Attention of the first `num_rows` rows of some page lists, of one query each. The scratch of
    several instances may be the same memory; the page lists are the caller's.
    """

    def __init__(
        self,
        pool: KVPool,
        options: AttentionOptions,
        lists: PageLists,
        num_rows: int,
        scratch: Tensor,
    ) -> None:
        """`scratch` float32 on the device, with room for at least one split of each context."""
        self._pool, self._options, self._lists = pool, options, lists
        heads = pool.num_kv_heads
        self._queries = triton.next_power_of_2(options.num_heads // heads)
        part = self._queries * (pool.head_dim + 2)
        splits = min(MAX_SPLITS, scratch.numel() // (num_rows * heads * part))
        self._splits = 1 << (splits.bit_length() - 1)
        self._scratch = scratch
        self._split_keys = SPLIT_KEYS * (2 if num_rows >= FULL_ROWS else 1)
        self._num_warps = NUM_WARPS if pool.head_dim > SMALL_HEAD else pool.dtype.itemsize
        self._counts = torch.zeros(num_rows, heads, dtype=torch.int32, device=pool.device)
        # Pairs of float8 numbers are read as one number.
        self._parts = 2 if pool.dtype.itemsize == 1 else 1
        self._pages = [self._pages_of(n) for n in range(pool.num_layers)]

    def _pages_of(self, layer: int) -> tuple[Tensor, Tensor, int]:
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        if self._parts == 2:
            keys, values = keys.view(torch.int16), values.view(torch.int16)
        return keys, values, keys.stride(2)

    def attend(self, layer: int, query: Tensor, window: int | None, out: Tensor) -> None:
        """Attend with queries [B, H, D] to keys and values in the pool; write out [B, H × D]."""
        pool, options = self._pool, self._options
        level = options.decode_level or 0
        if len(query) > FEW_ROWS:  # early programs of the next kernel would take their places
            level = min(level, 1)
        _decode_kernel[(len(query), pool.num_kv_heads, self._splits)](
            query,
            self._pages[layer],
            self._lists.numbers,
            out,
            self._scratch,
            self._counts,
            pool.head_dim**-0.5,
            query.stride(0),
            self._lists.num_rows,
            HEADS=(
                options.num_heads // pool.num_kv_heads,
                pool.num_kv_heads,
                pool.head_dim,
                self._queries,
            ),
            KEYS=(pool.page_size, self._parts, BLOCK, STAGES),
            SPLITS=(self._splits, self._split_keys),
            SEEN=(window or 0, options.soft_cap or 0.0),
            GROUP=GROUP,
            LEVEL=level,
            num_warps=self._num_warps,
            launch_pdl=level > 0,
        )
