"""`SdpaBackend`: the reference implementation with torch's attention, on the CPU and on a GPU.

Every query is attended by itself: a [G, D] × [D, L] problem for each KV head, where G query heads
share the KV head and L is the query's context rounded up to a whole tile, with the rest masked. On
a CPU each has a call of its own, from addresses with equal alignment, and all calls with one L have
one shape: the same kernel runs in the same order, with any number of threads. Therefore a token's
result does not depend on its batch or prompt chunk, bit for bit, which makes seeds reproducible. On
a GPU neighbouring queries of one tile share one call. In a layer with a sliding window, L starts at
the tile of the first key inside the window.

Keys are read in place where a row's pages are contiguous. Otherwise the row gets a `ContextCopy`,
which is gathered once and then extended token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm.attention.base import (
    AttentionBackend,
    AttentionLoad,
    AttentionOptions,
    attend_contiguous,
)
from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import TAIL_SLOTS, KVPool

TILE = 64  # keys; a multiple of every vector length
COPY_STEP = 4 * TILE  # capacities of context copies are multiples, so that buffers can be reused
MAX_CACHED_VIEWS = 1024
MAX_FREE_BUFFERS = 4
# Bytes; new tensors begin at a multiple. Vector kernels may treat values before the first whole
# vector differently.
ALIGNMENT = 64

assert TAIL_SLOTS >= TILE

LayerViews = list[tuple[Tensor, Tensor]]  # by layer: keys and values [1, Hkv, L, D]


class ContextCopy:
    """One row's contiguous keys and values: by layer [2 × Hkv, capacity, D].

    `buffer` [L, 2 × Hkv, capacity, D] may hold another row's old values, but no NaN: values past
    the context are masked.
    """

    __slots__ = ("_views", "buffer", "layers", "length", "pages")

    def __init__(self, pool: KVPool, pages: list[int], length: int, buffer: Tensor) -> None:
        """Gather `length` tokens from `pages`, which also cover later tokens."""
        self.pages = pages
        self.length = length
        self.buffer = buffer
        self.layers = list(buffer.unbind(0))
        self._views: dict[tuple[int, int], LayerViews] = {}
        filled = pages[: -(-length // pool.page_size)]
        index = torch.tensor(filled, dtype=torch.int64, device=pool.device)
        for layer, heads in enumerate(self.layers):
            if filled:
                pool.gather(layer, index, heads[:, : len(filled) * pool.page_size])

    def can_extend(self, batch: ForwardBatch, row: int) -> bool:
        """Whether this holds everything before the row's tokens, and has room for them."""
        context, fed = batch.context_lens[row], batch.query_lens[row]
        pages = batch.pages[row]
        return (
            fed == 1
            and self.length == context - fed
            and _round_up(context, TILE) <= self.buffer.shape[2]
            and self.pages == list(pages[: len(self.pages)])
        )

    def views(self, first: int, end: int) -> LayerViews:
        """Return keys and values of the tokens [first, end)."""
        if (first, end) not in self._views:
            self._views = {key: views for key, views in self._views.items() if key[1] == end}
            self._views[first, end] = _views(self.layers, first, end - first)
        return self._views[first, end]

    def store(self, layer: int, first: int, key_value: Tensor) -> None:
        """Store [n, 2, Hkv, D] keys and values of the tokens from position `first`."""
        target = self.layers[layer][:, first : first + len(key_value)]
        target.copy_(key_value.flatten(1, 2).transpose(0, 1))


class Span:
    """Queries of one row that share a tile: tokens [first, last) of the batch."""

    __slots__ = ("mask", "num_queries", "views")

    def __init__(self, num_queries: int, mask: Tensor, views: LayerViews) -> None:
        self.num_queries = num_queries
        self.mask = mask  # [n or 1, 1, 1, L]: 0 or −inf
        self.views = views


class SdpaPlan:
    """Data shared by the layers of one forward."""

    __slots__ = ("copies", "slots", "spans")

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots
        self.spans: dict[int | None, list[Span]] = {}  # by the layers' windows
        self.copies: list[tuple[ContextCopy, int, int, int]] = []  # copy, position, tokens [a, b)


class SdpaBackend(AttentionBackend[SdpaPlan]):
    """`torch.nn.functional.scaled_dot_product_attention` over the pages of one row at a time."""

    name = "sdpa"

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        super().__init__(pool, options)
        self._pool_views: dict[tuple[int, int], LayerViews] = {}
        # Copies of this plan's rows and of the last one's: a row that misses two forwards starts
        # again.
        self._copies: dict[str, ContextCopy] = {}
        self._older_copies: dict[str, ContextCopy] = {}
        # The first access to new memory is slow, so buffers are reused.
        self._free_buffers: dict[int, list[Tensor]] = {}
        self._mask_line = torch.zeros(0)
        self._mask_reach = 0

    def plan(self, batch: ForwardBatch) -> SdpaPlan:
        """Cut each row's queries into tiles and locate their keys."""
        for request_id in self._older_copies.keys() - self._copies.keys():
            self._keep_buffer(self._older_copies[request_id])
        self._older_copies, self._copies = self._copies, {}
        plan = SdpaPlan(batch.slot_mapping)
        plan.spans = {window: [] for window in self.windows}
        first = 0
        for row, fed in enumerate(batch.query_lens):
            context = batch.context_lens[row]
            start = self._run_start(batch, row)
            copy = None
            if start is None:
                copy = self._copy(batch, row)
                plan.copies.append((copy, context - fed, first, first + fed))
            for window, spans in plan.spans.items():
                self._add_spans(spans, (context - fed, context), window, start, copy)
            first += fed
        return plan

    def forward(self, plan: SdpaPlan, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        if key_value.dtype != self.pool.dtype:
            key_value = self.pool.as_stored(key_value)
        self.pool.write(layer, plan.slots, key_value)
        for copy, position, first, last in plan.copies:
            copy.store(layer, position, key_value[first:last])
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = key_value.shape[2]
        grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        spans = plan.spans[self.windows[layer]]
        if len(spans) == 1:
            return self._attend(spans[0], layer, grouped)
        parts = grouped.split([span.num_queries for span in spans])
        return torch.cat(
            [self._attend(span, layer, part) for span, part in zip(spans, parts, strict=True)]
        )

    def _attend(self, span: Span, layer: int, query: Tensor) -> Tensor:
        """Attend with queries [n, Hkv, G, D] of one span; return [n, Hkv × G × D]."""
        keys, values = span.views[layer]
        mask = span.mask
        if keys.dtype != query.dtype:
            keys, values, mask = keys.to(query.dtype), values.to(query.dtype), mask.to(query.dtype)
        num_queries, soft_cap = span.num_queries, self.options.soft_cap
        if query.device.type == "cpu":  # one call for several may sum in another order
            parts = []
            for one, seen in zip(query.split(1), mask.split(1), strict=True):
                aligned = one.clone() if one.data_ptr() % ALIGNMENT else one
                parts.append(attend_contiguous(aligned, keys, values, seen, soft_cap))
            return torch.cat(parts).reshape(num_queries, -1)
        if num_queries > 1:
            keys = keys.expand(num_queries, -1, -1, -1)
            values = values.expand(num_queries, -1, -1, -1)
        return attend_contiguous(query, keys, values, mask, soft_cap).reshape(num_queries, -1)

    def _run_start(self, batch: ForwardBatch, row: int) -> int | None:
        """Return the first slot of a row with contiguous pages; None when they are not contiguous,
        or not aligned.
        """
        size = batch.page_size
        if size * self.pool.head_dim * self.pool.dtype.itemsize % ALIGNMENT:
            return None
        pages = batch.pages[row]
        first, num_pages = pages[0], -(-batch.context_lens[row] // size)
        if pages[num_pages - 1] - first != num_pages - 1:
            return None
        if num_pages > 2 and list(pages[:num_pages]) != list(range(first, first + num_pages)):
            return None
        return first * size

    def _copy(self, batch: ForwardBatch, row: int) -> ContextCopy:
        request_id = batch.request_ids[row]
        copy = self._older_copies.get(request_id)
        context, fed = batch.context_lens[row], batch.query_lens[row]
        if copy is None or not copy.can_extend(batch, row):
            if copy is not None:
                self._keep_buffer(self._older_copies.pop(request_id))
            pages = list(batch.pages[row][: -(-context // batch.page_size)])
            copy = ContextCopy(self.pool, pages, context - fed, self._buffer(len(pages)))
        copy.length = context
        self._copies[request_id] = copy
        return copy

    def _buffer(self, num_pages: int) -> Tensor:
        """Return a buffer for so many pages, with room for the context to grow."""
        pool = self.pool
        capacity = _round_up(num_pages * pool.page_size + TILE, COPY_STEP)
        if self._free_buffers.get(capacity):
            return self._free_buffers[capacity].pop()
        shape = (pool.num_layers, 2 * pool.num_kv_heads, capacity, pool.head_dim)
        with torch.inference_mode(False):  # it outlives the mode that is active here
            return torch.zeros(shape, dtype=pool.dtype, device=pool.device)

    def _keep_buffer(self, copy: ContextCopy) -> None:
        """Keep a dropped copy's buffer for reuse; a few of each size are enough."""
        buffers = self._free_buffers.setdefault(copy.buffer.shape[2], [])
        if len(buffers) < MAX_FREE_BUFFERS:
            buffers.append(copy.buffer)

    def _add_spans(
        self,
        spans: list[Span],
        positions: tuple[int, int],
        window: int | None,
        start: int | None,
        copy: ContextCopy | None,
    ) -> None:
        """Add the queries at `positions` [first, end); each has one key more than the last, at most
        `window`.
        """
        position, end = positions
        while position < end:
            num_keys = _round_up(position + 1, TILE)
            last = min(end, num_keys)
            first = 0 if window is None else _first_key(position, window)
            if copy is not None:
                views = copy.views(first, num_keys)
            else:
                assert start is not None
                views = self._views_of_run(start + first, num_keys - first)
            mask = self._mask(position + 1 - first, last - position, num_keys - first, window)
            spans.append(Span(last - position, mask, views))
            position = last

    def _views_of_run(self, start: int, num_keys: int) -> LayerViews:
        key = (start, num_keys)
        views = self._pool_views.get(key)
        if views is None:
            if len(self._pool_views) >= MAX_CACHED_VIEWS:
                self._pool_views.clear()
            views = _views(self.pool.storage, start, num_keys)
            self._pool_views[key] = views
        return views

    def _mask(self, context: int, num_queries: int, num_keys: int, window: int | None) -> Tensor:
        """Return [n, 1, 1, num_keys]: query i attends to the last `window` of its first `context` +
        i keys.
        """
        longest = context + num_queries - 1
        if longest > self._mask_reach:
            self._extend_mask(2 * longest)
        line, start = self._mask_line, self._mask_reach - context
        if num_queries == 1 and (window is None or context <= window):
            mask = line[start : start + num_keys].view(1, 1, 1, num_keys)
            # GPU kernels require masks that start at an aligned address.
            return mask if mask.device.type == "cpu" else mask.clone()
        each = range(start, start - num_queries, -1)
        lines = torch.stack([line[first : first + num_keys] for first in each])
        if window is not None and context + num_queries > window + 1:
            keys = torch.arange(num_keys, device=lines.device)
            first_seen = torch.arange(num_queries, device=lines.device) + (context - window)
            lines.masked_fill_(keys < first_seen[:, None], float("-inf"))
        return lines.view(num_queries, 1, 1, num_keys)

    def _extend_mask(self, context: int) -> None:
        """Make the long line of zeros, then −inf, that masks are parts of: `context` zeros."""
        self._mask_reach = _round_up(context, TILE)
        zeros = torch.zeros(self._mask_reach)
        line = torch.cat([zeros, torch.full((TILE,), float("-inf"))])
        dtype = self.pool.dtype if self.pool.dtype.itemsize > 1 else torch.float32
        self._mask_line = line.to(self.pool.device, dtype)  # float8 has no −inf


def scratch_bytes(load: AttentionLoad) -> int:
    """Return the bytes of copied contexts and of masks, with contexts of the expected length.

    Every row is copied: pages are not contiguous where a prefix is shared, or once the pool has
    been in use for a while.
    """
    token_bytes = 2 * load.num_layers * load.num_kv_heads * load.head_dim * load.kv_itemsize
    copied = load.num_rows * _round_up(load.expected_len + TILE, COPY_STEP) * token_bytes
    masks = load.num_tokens * _round_up(load.expected_len, TILE) * load.itemsize
    return copied + masks


def _views(storage: list[Tensor], start: int, num_keys: int) -> LayerViews:
    views = []
    for heads in storage:
        keys, values = heads[:, start : start + num_keys].unsqueeze(0).chunk(2, dim=1)
        views.append((keys, values))
    return views


def _first_key(position: int, window: int) -> int:
    """Return the first key that a tile's queries read: the same for all queries of the tile."""
    first_of_tile = position // TILE * TILE
    return max(0, first_of_tile + 1 - window) // TILE * TILE


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
