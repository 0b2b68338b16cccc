"""`GatheredBackend`: plain torch over keys gathered page by page; it can be captured.

Rows that feed as many tokens are attended together: their pages are copied into one
[rows, Hkv, L, D] tensor, where L are the pages of the longest row, and what a query does not see
is masked. Where a forward reads and writes is said by tensors alone (page table, positions,
slots), so a captured decode goes on being right when their values change. It gathers contexts of
the greatest length every time, which only a small pool makes bearable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, AttentionOptions
from llm.attention.scores import attend
from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import KVPool
from llm.memory_copy import to_device

GATHERED_BYTES = 256 * 2**20  # of keys and values at once; a row alone may need more
MAX_CAPTURED_TOKENS = 2**14  # of the pool


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows of a batch that feed n tokens each."""

    page_table: Tensor  # int64 [B, P]
    positions: Tensor  # int64 [B, n] of the queries, ascending

    @property
    def num_queries(self) -> int:
        """Tokens of all its rows."""
        return self.positions.numel()


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """Where a forward's keys and values go, and which ones its queries see."""

    slots: Tensor  # int64 [T]
    parts: tuple[Part, ...]


class GatheredBackend(AttentionBackend[GatheredPlan]):
    """`torch.nn.functional.scaled_dot_product_attention` over copies of the pages."""

    name = "gathered"

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        super().__init__(pool, options)
        self.can_capture = pool.num_pages * pool.page_size <= MAX_CAPTURED_TOKENS
        row_bytes = 2 * pool.num_kv_heads * pool.head_dim * options.dtype.itemsize
        self._gathered_tokens = GATHERED_BYTES // row_bytes

    def plan(self, batch: ForwardBatch) -> GatheredPlan:
        """See `AttentionBackend.plan`."""
        parts = []
        most = max(1, self._gathered_tokens // max(batch.context_lens, default=1))
        for first, last in _runs(batch.query_lens, most):
            num_tokens, ends = batch.query_lens[first], batch.context_lens[first:last]
            # Not `batch.positions`, which are rotary's and may be shifted.
            positions = np.array(ends)[:, None] - np.arange(num_tokens, 0, -1)
            table = self._page_table(batch, range(first, last))
            parts.append(Part(table, to_device(torch.from_numpy(positions), self.pool.device)))
        return GatheredPlan(batch.slot_mapping, tuple(parts))

    def capture_plan(
        self, num_rows: int, max_context: int, slots: Tensor | None = None
    ) -> GatheredPlan:
        """See `AttentionBackend.capture_plan`."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.pool.device)

        num_pages = -(-max_context // self.pool.page_size)
        part = Part(zeros(num_rows, num_pages), zeros(num_rows, 1))
        return GatheredPlan(zeros(num_rows) if slots is None else slots, (part,))

    def replan(self, plan: GatheredPlan, batch: ForwardBatch) -> None:
        """See `AttentionBackend.replan`."""
        (part,) = plan.parts
        table = self._page_table(batch, range(len(batch.pages)))
        part.page_table[:, : table.shape[1]].copy_(table)  # pages further on are masked
        part.positions.copy_(batch.positions[:, None])
        if plan.slots is not batch.slot_mapping:
            plan.slots.copy_(batch.slot_mapping)

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

    def _page_table(self, batch: ForwardBatch, rows: range) -> Tensor:
        """int64 [rows, P] pages of the contexts; page 0 where a row has fewer."""
        counts = [-(-batch.context_lens[row] // batch.page_size) for row in rows]
        table = np.zeros((len(rows), max(counts)), dtype=np.int64)
        for line, row, count in zip(table, rows, counts, strict=True):
            line[:count] = batch.pages[row][:count]
        return to_device(torch.from_numpy(table), self.pool.device)

    def _attend(self, part: Part, layer: int, query: Tensor) -> Tensor:
        """Queries [B × n, H, D] of a part; returns [B × n, H × D]."""
        keys, values = self._gather(layer, part.page_table, query.dtype)
        num_rows, num_kv_heads, num_keys, head_dim = keys.shape
        num_queries = part.positions.shape[1]
        grouped = query.reshape(num_rows, num_queries, num_kv_heads, -1, head_dim)
        group = grouped.shape[3]
        hidden = _hidden(part.positions, num_keys, self.windows[layer])
        by_head = grouped.transpose(1, 2).flatten(2, 3)  # [B, Hkv, n × G, D]
        line = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask = line.masked_fill_(hidden, float("-inf")).repeat_interleave(group, dim=1)[:, None]
        attended = attend(by_head, keys, values, mask, self.options.soft_cap)
        by_query = attended.unflatten(2, (num_queries, group)).transpose(1, 2)
        return by_query.reshape(num_rows * num_queries, -1)

    def _gather(self, layer: int, page_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, P × page_size, D] of the pages [B, P]."""
        gathered = self.pool.take(layer, page_table.flatten()).to(dtype)
        by_row = gathered.unflatten(1, (len(page_table), -1)).transpose(0, 1)
        keys, values = by_row.chunk(2, dim=1)
        return keys, values


def _runs(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """[first, last) of neighbours that are equal, at most so many at once."""
    first = 0
    for index, length in enumerate(lengths):
        is_last = index + 1 == len(lengths) or lengths[index + 1] != length
        if is_last or index + 1 - first == most:
            yield first, index + 1
            first = index + 1


def _hidden(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """bool [B, n, num_keys]: whether a key is not seen by the query at a position."""
    keys = torch.arange(num_keys, device=positions.device)
    distance = positions[:, :, None] - keys
    is_later = distance < 0
    return is_later if window is None else is_later | (distance >= window)
