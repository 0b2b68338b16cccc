"""`FlashInferBackend`: FlashInfer's paged attention on CUDA, over the pool without copies.

A batch is computed in two calls, each of which reads keys from their pages:

    rows    | decoding, one query each | … | prompts, chunks of prompts | …
    call    | decode                       | extend

A prompt whose only new token follows a cached prefix may be in either call: both read everything
from pages, and nothing is merged. A captured plan has the same two calls, with the sizes of its
shape. On Hopper the second call uses FA2 when captured, and FA3 otherwise. In place of the first
one captured plans have the kernels of this repository, where these are in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import (
    AttentionBackend,
    AttentionOptions,
    CapturedShape,
    PlanMemory,
)
from llm.attention.few_rows import FEW_ROWS, FewRowsDecode, can_compute
from llm.attention.flashinfer_kernels import (
    CapturedExtendCall,
    DecodeCall,
    ExtendCall,
    Kernels,
)
from llm.attention.many_rows import ManyRowsDecode
from llm.attention.page_lists import PageLists, list_words, write_page_lists
from llm.attention.workspaces import NUM_STAGINGS, Workspaces, WorkspaceSizes
from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import KVPool
from llm.memory.staging import Section, StagedMemory, section_bytes


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call for the tokens [first, last)."""

    first: int
    last: int
    wrappers: dict[int | None, Any]  # FlashInfer's wrappers, planned, by the layers' windows

    @classmethod
    def of(
        cls,
        first: int,
        last: int,
        calls: Mapping[int | None, DecodeCall | ExtendCall | CapturedExtendCall],
    ) -> PlannedCall:
        """Create from calls that have been planned."""
        return cls(first, last, {window: call.wrapper for window, call in calls.items()})


@dataclass(frozen=True, slots=True)
class CapturedCalls:
    """Inputs of a captured plan's calls, and how they are updated for other rows."""

    shape: CapturedShape
    tables: Section  # int32: `query_offsets`, then `lists`
    # int32 [prompts + 1] on the device: first query of each prompt, then the number of queries
    query_offsets: Tensor
    lists: PageLists  # on the device: those of single rows, then those of prompts
    out: Tensor  # [T, H × D], always finite; empty without prompts
    decodes: tuple[DecodeCall, ...] = ()
    extends: tuple[CapturedExtendCall, ...] = ()
    few_rows: FewRowsDecode | None = None  # computes all rows, if set
    many_rows: ManyRowsDecode | None = None  # computes the single rows, if set
    own: StagedMemory | None = None  # memory of the tables; None: the caller sends them


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The calls of a forward and their tokens."""

    slots: Tensor  # int64 [T]
    calls: tuple[PlannedCall, ...]
    captured: CapturedCalls | None = None


class FlashInferBackend(AttentionBackend[FlashInferPlan]):
    """FlashInfer's attention. Layers with different windows have separate calls."""

    name = "flashinfer"
    can_capture = True

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        """Raise `ConfigError` when there are no kernels for the pool."""
        super().__init__(pool, options)
        kernels = Kernels.of(pool, options)
        groups = options.num_heads // pool.num_kv_heads
        heads = (pool.num_kv_heads, groups, pool.head_dim)
        sizes = WorkspaceSizes(options.max_rows, *heads, kernels.num_processors)
        self._parts = (kernels, Workspaces(pool.device, sizes.float_bytes))
        self._pages = [(pool.keys(n), pool.values(n)) for n in range(pool.num_layers)]
        windows = dict.fromkeys(self.windows)
        self._decodes = {window: DecodeCall(*self._parts, window) for window in windows}
        self._extends = {window: ExtendCall(*self._parts, window) for window in windows}
        self._out = torch.empty(0, dtype=options.dtype, device=pool.device)
        self._has_own_kernels = can_compute(pool, options)
        self.can_capture_prompts = self._parts[0].has_captured_extend(windows)

    @property
    def description(self) -> str:
        """See `AttentionBackend.description`."""
        many = "tensor cores" if self._parts[0].uses_tensor_cores(None) else "CUDA cores"
        many = "a built-in kernel" if self._has_own_kernels else many
        extending = dict.fromkeys(call.kernel.upper() for call in self._extends.values())
        return f"flashinfer, many rows on {many}, prompts by {' and '.join(extending)}"

    def plan(self, batch: ForwardBatch) -> FlashInferPlan:
        """See `AttentionBackend.plan`."""
        calls = []
        fed, decoding = batch.query_lens, batch.num_singles
        if decoding:
            lists = PageLists.of(batch, 0, decoding).pinned().all_rows
            for decode in self._decodes.values():
                decode.plan(lists)
            calls.append(PlannedCall.of(0, decoding, self._decodes))
        if decoding < len(fed):
            lists = PageLists.of(batch, decoding, len(fed)).pinned().all_rows
            offsets = _pinned([0, *accumulate(fed[decoding:])])
            context_lens = _pinned(batch.context_lens[decoding:])
            for extend in self._extends.values():
                extend.plan(offsets, lists, context_lens)
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
        captured = plan.captured
        if captured is not None and captured.few_rows is not None:
            return captured.few_rows.attend(layer, query, self.windows[layer])
        if captured is not None and captured.shape.num_prompts:
            out = captured.out.view(query.shape)  # padding tokens keep their previous values
        else:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if captured is not None and captured.many_rows is not None:
            last = captured.shape.num_singles
            window = self.windows[layer]
            captured.many_rows.attend(layer, query[:last], window, out[:last])
        for call in plan.calls:
            call.wrappers[self.windows[layer]].run(
                query[call.first : call.last],
                self._pages[layer],
                out=out[call.first : call.last],
                enable_pdl=self.options.enable_pdl,
            )
        return out.flatten(1)

    def table_words(self, shape: CapturedShape, max_context: int) -> int:
        """See `AttentionBackend.table_words`."""
        lists = list_words(shape.num_rows, -(-max_context // self.pool.page_size))
        return _query_words(shape) + lists

    def capture_plan(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None = None
    ) -> FlashInferPlan:
        """See `AttentionBackend.capture_plan`."""
        last, num_rows = shape.num_singles, shape.num_rows
        captured, slots = self._in_place(shape, max_context, memory)
        padding = PageLists.padding(num_rows).pinned()
        if self._has_own_kernels and not shape.num_prompts and last <= FEW_ROWS:
            captured.lists.numbers[: len(padding.numbers)].copy_(padding.numbers)
            few_rows = FewRowsDecode(self.pool, self.options, captured.lists)
            return FlashInferPlan(slots, (), replace(captured, few_rows=few_rows))
        calls, windows = [], dict.fromkeys(self.windows)
        decodes, extends, many_rows = {}, {}, None
        if last and self._has_own_kernels:
            captured.lists.numbers[: len(padding.numbers)].copy_(padding.numbers)
            floats = self._parts[1].floats.view(torch.float32)
            many_rows = ManyRowsDecode(self.pool, self.options, captured.lists, last, floats)
        elif last:
            buffers = captured.lists.rows(0, last)
            decodes = {window: DecodeCall(*self._parts, window, buffers) for window in windows}
            for decode in decodes.values():
                decode.plan(padding.rows(0, last))
            calls.append(PlannedCall.of(0, last, decodes))
        if shape.num_prompts:
            buffers, count = captured.lists.rows(last, num_rows), shape.num_prompt_tokens
            extends = {
                window: CapturedExtendCall(
                    *self._parts, window, buffers, captured.query_offsets, count
                )
                for window in windows
            }
            for extend in extends.values():
                extend.plan(padding.rows(last, num_rows))
            calls.append(PlannedCall.of(last, shape.num_tokens, extends))
        found = replace(
            captured,
            decodes=tuple(decodes.values()),
            extends=tuple(extends.values()),
            many_rows=many_rows,
        )
        return FlashInferPlan(slots, tuple(calls), found)

    def _in_place(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None
    ) -> tuple[CapturedCalls, Tensor]:
        """Return the inputs and outputs of the calls, and the slots.

        All plans write their outputs to the same memory if it is large enough; captured graphs keep
        it alive.
        """
        device, words = self.pool.device, torch.int32
        own = None
        if memory is None:
            size = self.table_words(shape, max_context)
            own = StagedMemory(section_bytes(size, words), device, NUM_STAGINGS)
            slots = torch.zeros(shape.num_tokens, dtype=torch.int64, device=device)
            memory = PlanMemory(slots, own.section(0, size, words))
        width = self.options.num_heads * self.pool.head_dim
        size = shape.num_tokens * width if shape.num_prompts else 0
        if len(self._out) < size:
            self._out = torch.zeros(size, dtype=self.options.dtype, device=device)
        tables, first = memory.tables, _query_words(shape)
        captured = CapturedCalls(
            shape,
            tables,
            tables.device[: shape.num_prompts + 1],
            PageLists(tables.device[first:], shape.num_rows),
            self._out[:size].view(-1, width),
            own=own,
        )
        return captured, memory.slots

    def replan(self, plan: FlashInferPlan, batch: ForwardBatch) -> None:
        """See `AttentionBackend.replan`."""
        captured = plan.captured
        assert captured is not None
        shape, own = captured.shape, captured.own
        if own is not None:
            own.begin()
        self._point(captured, batch)
        if own is not None:
            own.send()
            first = shape.first_token(batch.num_singles)
            plan.slots.zero_()
            plan.slots[first : first + len(batch.slot_mapping)].copy_(batch.slot_mapping)

    def _point(self, captured: CapturedCalls, batch: ForwardBatch) -> None:
        """Write the tables and plan the calls."""
        shape, singles, num_rows = captured.shape, batch.num_singles, len(batch.query_lens)
        before = shape.first_token(singles)
        after = shape.num_rows - before - num_rows
        start = _query_words(shape)

        def take(size: int) -> np.ndarray:
            return captured.tables.take(start + size)[start:]

        lists = write_page_lists(batch, (0, num_rows), take, before=before, after=after)
        offsets, context_lens = map(torch.from_numpy, lists)
        split = shape.num_singles
        for decode in captured.decodes:
            decode.replan(offsets[: split + 1], context_lens[:split])
        if shape.num_prompts:
            queries = captured.tables.take(shape.num_prompts + 1)
            fed = np.cumsum((0, *batch.query_lens[singles:]), dtype=np.int32)
            queries[: len(fed)] = fed
            queries[len(fed) :] = fed[-1]
            query_offsets = torch.from_numpy(queries)
            for extend in captured.extends:
                extend.replan(query_offsets, offsets[split:], context_lens[split:])


def _pinned(numbers: Sequence[int]) -> Tensor:
    """Return int32 in pinned memory, which can be sent to a GPU without blocking."""
    return torch.tensor(numbers, dtype=torch.int32).pin_memory()


def _query_words(shape: CapturedShape) -> int:
    """Return the size of the query offsets in the tables; the data behind them is aligned."""
    return -(-(shape.num_prompts + 1) // 4) * 4 if shape.num_prompts else 0
