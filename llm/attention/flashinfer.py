"""`FlashInferBackend`: FlashInfer's paged attention on CUDA, over the pool as it is.

A batch is computed in two calls, each of which reads keys from their pages:

    rows    | decoding, one query each | … | prompts, chunks of prompts | …
    call    | decode                       | extend

A prompt whose only new token follows a cached prefix may be in either one: both read everything
from pages, so nothing is merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, AttentionOptions
from llm.attention.few_rows import FEW_ROWS, FewRowsDecode
from llm.attention.flashinfer_kernels import DecodeCall, ExtendCall, Kernels, Workspaces
from llm.attention.page_lists import PageLists
from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call for the tokens [first, last)."""

    first: int
    last: int
    wrappers: dict[int | None, Any]  # FlashInfer's, planned, by the layers' windows

    @classmethod
    def of(
        cls, first: int, last: int, calls: Mapping[int | None, DecodeCall | ExtendCall]
    ) -> PlannedCall:
        """Of calls that have been planned."""
        return cls(first, last, {window: call.wrapper for window, call in calls.items()})


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """Which calls compute which tokens."""

    slots: Tensor  # int64 [T]
    calls: tuple[PlannedCall, ...]
    lists: PageLists | None = None  # on the device: what a captured plan's calls read
    decodes: tuple[DecodeCall, ...] = ()  # of a captured plan
    few_rows: FewRowsDecode | None = None  # which computes all of a captured plan


class FlashInferBackend(AttentionBackend[FlashInferPlan]):
    """Layers with different windows have calls of their own."""

    name = "flashinfer"
    can_capture = True

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        """Raises `ConfigError` when there are no kernels for the pool."""
        super().__init__(pool, options)
        self._parts = (Kernels.of(pool, options), Workspaces(pool.device))
        self._pages = [(pool.keys(n), pool.values(n)) for n in range(pool.num_layers)]
        windows = dict.fromkeys(self.windows)
        self._decodes = {window: DecodeCall(*self._parts, window) for window in windows}
        self._extends = {window: ExtendCall(*self._parts, window) for window in windows}
        self._room = torch.empty(0, dtype=torch.int32, device=pool.device)
        self._has_few_rows = FewRowsDecode.can_compute(pool, options)

    @property
    def description(self) -> str:
        """See `AttentionBackend.description`."""
        many = "tensor cores" if self._parts[0].uses_tensor_cores(None) else "CUDA cores"
        extending = dict.fromkeys(call.kernel.upper() for call in self._extends.values())
        return f"flashinfer, many rows on {many}, prompts by {' and '.join(extending)}"

    def plan(self, batch: ForwardBatch) -> FlashInferPlan:
        """See `AttentionBackend.plan`."""
        calls = []
        fed = batch.query_lens
        decoding = next((row for row, length in enumerate(fed) if length > 1), len(fed))
        if decoding:
            lists = PageLists.of(batch, 0, decoding).pinned()
            for decode in self._decodes.values():
                decode.plan(lists)
            calls.append(PlannedCall.of(0, decoding, self._decodes))
        if decoding < len(fed):
            lists = PageLists.of(batch, decoding, len(fed)).pinned()
            offsets = torch.tensor([0, *accumulate(fed[decoding:])], dtype=torch.int32)
            for extend in self._extends.values():
                extend.plan(offsets.pin_memory(), lists)
            calls.append(PlannedCall.of(decoding, sum(fed), self._extends))
        return FlashInferPlan(batch.slot_mapping, tuple(calls))

    def forward(self, plan: FlashInferPlan, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See `AttentionBackend.forward`."""
        self.pool.write(layer, plan.slots, key_value)
        return self.attend(plan, layer, query)

    def slots(self, plan: FlashInferPlan) -> Tensor:
        """See `AttentionBackend.slots`."""
        return plan.slots

    def attend(self, plan: FlashInferPlan, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        if plan.few_rows is not None:
            return plan.few_rows.attend(layer, query, self.windows[layer])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for call in plan.calls:
            call.wrappers[self.windows[layer]].run(
                query[call.first : call.last],
                self._pages[layer],
                out=out[call.first : call.last],
                enable_pdl=self.options.enable_pdl,
            )
        return out.flatten(1)

    def capture_plan(
        self, num_rows: int, max_context: int, slots: Tensor | None = None
    ) -> FlashInferPlan:
        """See `AttentionBackend.capture_plan`."""
        lists = self._lists_in_place(num_rows, -(-max_context // self.pool.page_size))
        if slots is None:
            slots = torch.zeros(num_rows, dtype=torch.int64, device=self.pool.device)
        padding = PageLists.padding(num_rows).pinned()
        if self._has_few_rows and num_rows <= FEW_ROWS:
            lists.numbers[: len(padding.numbers)].copy_(padding.numbers)
            few_rows = FewRowsDecode(self.pool, self.options, lists)
            return FlashInferPlan(slots, (), lists, few_rows=few_rows)
        windows = dict.fromkeys(self.windows)
        decodes = {window: DecodeCall(*self._parts, window, lists) for window in windows}
        for decode in decodes.values():
            decode.plan(padding)
        calls = (PlannedCall.of(0, num_rows, decodes),)
        return FlashInferPlan(slots, calls, lists, tuple(decodes.values()))

    def _lists_in_place(self, num_rows: int, num_pages: int) -> PageLists:
        """Room for rows of up to `num_pages` each: the same memory for all captured plans, as far
        as it is large enough. What is captured keeps it alive.
        """
        size = 2 * num_rows + 1 + num_rows * num_pages
        if len(self._room) < size:
            self._room = torch.zeros(size, dtype=torch.int32, device=self.pool.device)
        return PageLists(self._room, num_rows)

    def replan(self, plan: FlashInferPlan, batch: ForwardBatch) -> None:
        """See `AttentionBackend.replan`."""
        assert plan.lists is not None
        lists = PageLists.of(batch, 0, plan.lists.num_rows)
        target = plan.lists.numbers[: len(lists.numbers)]
        target.copy_(lists.pinned().numbers, non_blocking=True)
        for decode in plan.decodes:
            decode.replan(lists)
        if plan.slots is not batch.slot_mapping:
            plan.slots.copy_(batch.slot_mapping)
