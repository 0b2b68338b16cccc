"""`GatheredBackend`: plain torch over keys gathered page by page; it can be captured.

Rows that feed the same number of tokens are attended together: their pages are copied into one
[rows, Hkv, L, D] tensor, where L are the pages of the longest row, and keys outside of a query's
context are masked. All addresses of a forward are in tensors (page table, positions, slots), so
that a captured forward follows changes of their values. A captured forward always gathers contexts
of the greatest length, which is only practical for a small pool.

The number of tokens of a captured prompt may change, too. Therefore all captured prompts are one
row, whose keys are those of all prompts in order: a query attends to the keys from its own prompt's
first one to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import (
    AttentionBackend,
    AttentionLoad,
    AttentionOptions,
    CapturedShape,
    PlanMemory,
    attend_contiguous,
)
from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import KVPool
from llm.memory.transfer import to_device

GATHERED_BYTES = 256 * 2**20  # of keys and values at once; a single row may need more
MASKED_PAIRS = 2**22  # pairs of a query and a key at once; a single query may need more
MAX_CAPTURED_TOKENS = 2**14  # size of the pool


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows of a batch that feed n tokens each."""

    page_table: Tensor  # int64 [B, P]
    positions: Tensor  # int64 [B, n] of the queries: the last keys that they attend to
    firsts: Tensor | None = None  # int64 [B, n] the first keys that they attend to; None: all 0

    @property
    def num_queries(self) -> int:
        """Number of tokens of all rows."""
        return self.positions.numel()


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """Slots of a forward's keys and values, and the parts of its rows."""

    slots: Tensor  # int64 [T]
    parts: tuple[Part, ...]
    shape: CapturedShape | None = None  # of a captured plan
    copies_slots: bool = False  # at each `replan`


class GatheredBackend(AttentionBackend[GatheredPlan]):
    """`torch.nn.functional.scaled_dot_product_attention` over copies of the pages."""

    name = "gathered"

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        super().__init__(pool, options)
        self.can_capture = pool.num_pages * pool.page_size <= MAX_CAPTURED_TOKENS
        self.can_capture_prompts = self.can_capture
        row_bytes = 2 * pool.num_kv_heads * pool.head_dim * options.dtype.itemsize
        self._gathered_tokens = GATHERED_BYTES // row_bytes

    def plan(self, batch: ForwardBatch) -> GatheredPlan:
        """See `AttentionBackend.plan`."""
        parts = []
        longest = max(batch.context_lens, default=1)
        for first, last in _runs(batch.query_lens, partial(self._most_rows, longest)):
            num_tokens, ends = batch.query_lens[first], batch.context_lens[first:last]
            # Not `batch.positions`, which are those of rotary embeddings and may be shifted.
            positions = np.array(ends)[:, None] - np.arange(num_tokens, 0, -1)
            table = to_device(
                torch.from_numpy(self._page_table(batch, range(first, last))), self.pool.device
            )
            # Several rows have all of their queries in one part.
            size = num_tokens if last - first > 1 else max(1, MASKED_PAIRS // longest)
            for start in range(0, num_tokens, size):
                own = np.ascontiguousarray(positions[:, start : start + size])
                parts.append(Part(table, to_device(torch.from_numpy(own), self.pool.device)))
        return GatheredPlan(batch.slot_mapping, tuple(parts))

    def _most_rows(self, longest: int, num_tokens: int) -> int:
        """Return the number of rows of a part, with so many queries and at most `longest` keys."""
        pairs = MASKED_PAIRS // (longest * num_tokens)
        return max(1, min(self._gathered_tokens // longest, pairs))

    def capture_plan(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None = None
    ) -> GatheredPlan:
        """See `AttentionBackend.capture_plan`."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=self.pool.device)

        parts, num_pages = [], -(-max_context // self.pool.page_size)
        if shape.num_singles:
            rows = shape.num_singles
            parts.append(Part(zeros(rows, num_pages), zeros(rows, 1)))
        if shape.num_prompts:
            queries = (1, shape.num_prompt_tokens)
            table = zeros(1, shape.num_prompts * num_pages)
            parts.append(Part(table, zeros(*queries), zeros(*queries)))
        slots = zeros(shape.num_tokens) if memory is None else memory.slots
        return GatheredPlan(slots, tuple(parts), shape, copies_slots=memory is None)

    def replan(self, plan: GatheredPlan, batch: ForwardBatch) -> None:
        """See `AttentionBackend.replan`."""
        shape, singles, parts = plan.shape, batch.num_singles, iter(plan.parts)
        assert shape is not None
        first = shape.first_token(singles)
        if shape.num_singles:
            self._point_singles(next(parts), batch, first)
        if shape.num_prompts:
            self._point_prompts(next(parts), batch, shape)
        if plan.copies_slots:
            plan.slots.zero_()
            plan.slots[first : first + len(batch.slot_mapping)].copy_(batch.slot_mapping)

    def _point_singles(self, part: Part, batch: ForwardBatch, first: int) -> None:
        """Copy the batch's leading rows of one token to a part from `first` on."""
        table, positions = (np.zeros(t.shape, np.int64) for t in (part.page_table, part.positions))
        last = first + batch.num_singles
        if first < last:
            positions[first:last, 0] = np.array(batch.context_lens[: last - first]) - 1
            pages = self._page_table(batch, range(last - first))
            table[first:last, : pages.shape[1]] = pages
        self._point(part, table, positions)

    def _point_prompts(self, part: Part, batch: ForwardBatch, shape: CapturedShape) -> None:
        """Copy the batch's other rows to the prompts of a captured part."""
        assert part.firsts is not None
        num_pages = part.page_table.shape[1] // shape.num_prompts
        table = np.zeros((shape.num_prompts, num_pages), np.int64)
        positions, firsts = (np.zeros(shape.num_prompt_tokens, np.int64) for _ in range(2))
        fed, num_keys = 0, num_pages * self.pool.page_size
        for place, row in enumerate(range(batch.num_singles, len(batch.query_lens))):
            count, context = batch.query_lens[row], batch.context_lens[row]
            pages = self._page_table(batch, range(row, row + 1))[0]
            table[place, : len(pages)] = pages
            firsts[fed : fed + count] = place * num_keys
            positions[fed : fed + count] = place * num_keys + np.arange(context - count, context)
            fed += count
        self._point(part, table.reshape(1, -1), positions[None])
        part.firsts.copy_(to_device(torch.from_numpy(firsts[None]), self.pool.device))

    def _point(self, part: Part, table: np.ndarray, positions: np.ndarray) -> None:
        for target, values in ((part.page_table, table), (part.positions, positions)):
            target.copy_(to_device(torch.from_numpy(values), self.pool.device))

    def forward(self, plan: GatheredPlan, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        self.pool.write(layer, plan.slots, key_value)
        return self.attend(plan, layer, query)

    def slots(self, plan: GatheredPlan) -> Tensor:
        """See `AttentionBackend.slots`."""
        return plan.slots

    def attend(self, plan: GatheredPlan, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        pieces = query.split([part.num_queries for part in plan.parts])
        attended = [
            self._attend(part, layer, piece) for part, piece in zip(plan.parts, pieces, strict=True)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _page_table(self, batch: ForwardBatch, rows: range) -> np.ndarray:
        """Return int64 [rows, P] pages of the contexts; page 0 where a row has fewer."""
        counts = [-(-batch.context_lens[row] // batch.page_size) for row in rows]
        table = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for line, row, count in zip(table, rows, counts, strict=True):
            line[:count] = batch.pages[row][:count]
        return table

    def _attend(self, part: Part, layer: int, query: Tensor) -> Tensor:
        """Attend with queries [B × n, H, D] of a part; returns [B × n, H × D]."""
        keys, values = self._gather(layer, part.page_table, query.dtype)
        num_rows, num_kv_heads, num_keys, head_dim = keys.shape
        num_queries = part.positions.shape[1]
        grouped = query.reshape(num_rows, num_queries, num_kv_heads, -1, head_dim)
        group = grouped.shape[3]
        hidden = _hidden(part, num_keys, self.windows[layer])
        by_head = grouped.transpose(1, 2).flatten(2, 3)  # [B, Hkv, n × G, D]
        line = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask = line.masked_fill_(hidden, float("-inf")).repeat_interleave(group, dim=1)[:, None]
        attended = attend_contiguous(by_head, keys, values, mask, self.options.soft_cap)
        by_query = attended.unflatten(2, (num_queries, group)).transpose(1, 2)
        return by_query.reshape(num_rows * num_queries, -1)

    def _gather(self, layer: int, page_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, Hkv, P × page_size, D] of the pages [B, P]."""
        gathered = self.pool.take(layer, page_table.flatten()).to(dtype)
        by_row = gathered.unflatten(1, (len(page_table), -1)).transpose(0, 1)
        keys, values = by_row.chunk(2, dim=1)
        return keys, values


def scratch_bytes(load: AttentionLoad) -> int:
    """Return the largest scratch of an eager forward: keys and values, their distances from the
    queries, and masks.
    """
    row_bytes = 2 * load.num_kv_heads * load.head_dim * load.itemsize
    gathered = max(GATHERED_BYTES, load.context_len * row_bytes)
    if load.kv_itemsize != load.itemsize:
        gathered += gathered * load.kv_itemsize // load.itemsize
    pairs = max(MASKED_PAIRS, GATHERED_BYTES // row_bytes, load.context_len)
    return gathered + pairs * (8 + 1 + load.itemsize * (1 + load.num_groups))


def _runs(lengths: Sequence[int], most_rows: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Iterate over [first, last) of runs of equal lengths, of at most `most_rows(length)` each."""
    first = 0
    for index, length in enumerate(lengths):
        is_last = index + 1 == len(lengths) or lengths[index + 1] != length
        if is_last or index + 1 - first == most_rows(length):
            yield first, index + 1
            first = index + 1


def _hidden(part: Part, num_keys: int, window: int | None) -> Tensor:
    """Return bool [B, n, num_keys]: whether a key is masked for a query."""
    keys = torch.arange(num_keys, device=part.positions.device)
    distance = part.positions[:, :, None] - keys
    is_hidden = distance < 0
    if window is not None:
        is_hidden |= distance >= window
    if part.firsts is not None:
        is_hidden |= keys < part.firsts[:, :, None]
    return is_hidden
