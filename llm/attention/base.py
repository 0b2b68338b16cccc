"""`AttentionBackend`: plan one forward's reads and writes of the KV pool, then run each layer.

A forward is planned in one of two ways:

    plan = backend.plan(batch)                 any batch; the plan is used for this forward only
    plan = backend.capture_plan(rows, context) once; a decode plan over tensors that stay in place
    backend.replan(plan, batch)                before each forward: other rows, the same tensors

The second is for CUDA graphs. `capture_plan` and `replan` are called outside of the graph,
`forward` is captured and replayed, and reads what the last `replan` wrote. The caller pads:

    row that pads    page table (0,), context length 1, slot 0: page 0 belongs to no request

Plans of one backend may share memory: the plan that was made or pointed at rows last is the one
whose forwards may run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from llm.batch import ForwardBatch, KVSlots
from llm.kv_cache.kv_pool import KVPool
from llm.memory_copy import to_device

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model asks of attention, and how it is to be computed."""

    num_heads: int  # of queries
    dtype: torch.dtype  # of queries, and of what they are answered
    # By layer: a query sees that many keys, its own included; None: all. (): all layers see all.
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None  # scores s become c × tanh(s / c)
    enable_pdl: bool = False  # kernels may start before the one ahead of them has ended
    few_rows_level: int | None = None  # launch level of the own kernel for few rows; None: no such
    batch_invariant: bool = False  # no row's sums are in another order when others are beside it


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention of a ragged batch over pages. Layers share a plan."""

    name: ClassVar[str]  # in the registry
    can_capture: bool = False  # whether there are `capture_plan` and `replan`

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        self.pool = pool
        self.options = options
        self.windows = options.windows or (None,) * pool.num_layers

    @property
    def description(self) -> str:
        """Its name, and what else there is to say about how it computes."""
        return self.name

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlanT:
        """What every layer of this forward needs to know. Called once for each forward."""

    @abstractmethod
    def forward(self, plan: PlanT, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [T, 2, Hkv, D] keys and values, answer queries [T, H, D] with [T, H × D]."""

    def slots(self, plan: PlanT) -> Tensor | None:
        """int64 [T] slots of the pool that `forward` stores in; None: it keeps copies elsewhere."""
        return None

    def attend(self, plan: PlanT, layer: int, query: Tensor) -> Tensor:
        """`forward` for keys and values that are in their `slots` already."""
        raise NotImplementedError(f"{type(self).__name__} stores keys and values itself")

    def capture_plan(self, num_rows: int, max_context: int, slots: Tensor | None = None) -> PlanT:
        """A plan for decode batches of exactly `num_rows` rows with contexts up to `max_context`.

        `slots` [num_rows]: where the slot mapping of every batch will lie; None: it is copied.
        Until the first `replan` every row pads.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def replan(self, plan: PlanT, batch: ForwardBatch) -> None:
        """Point a plan of `capture_plan` at another decode batch of as many rows.

        Its work is queued on the current stream, behind the forwards that still read the plan;
        the host never waits for the device. `batch` may be forgotten afterwards, its tensors too.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")


@dataclass(frozen=True, slots=True)
class PlannedAttention(Generic[PlanT]):
    """A backend and its plan for one forward: what a model gets as `kv_cache_inputs`."""

    forward_batch: ForwardBatch
    backend: AttentionBackend[PlanT]
    plan: PlanT

    @classmethod
    def create(
        cls, batch: ForwardBatch, backend: AttentionBackend[PlanT]
    ) -> PlannedAttention[PlanT]:
        """Plan `batch`."""
        return cls(batch, backend, backend.plan(batch))

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Run one layer."""
        return self.backend.forward(self.plan, layer, query, key_value)

    def slots(self, layer: int) -> KVSlots | None:
        """Where a kernel may store one layer's keys and values before `attend_stored`.

        Nowhere in pages of bytes: `KVPool.write` knows how numbers get in there.
        """
        slots, pool = self.backend.slots(self.plan), self.backend.pool
        if slots is None or pool.dtype.itemsize == 1:
            return None
        return KVSlots(pool.keys(layer), pool.values(layer), slots)

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """Run one layer whose keys and values are in their slots."""
        return self.backend.attend(self.plan, layer, query)

    def advanced(self, next_tokens: Tensor) -> PlannedAttention[PlanT]:
        """The plan for the decode forward that feeds `next_tokens` [B]."""
        batch = self.forward_batch
        places = to_device(torch.tensor(batch.next_places()), batch.positions.device)
        return self.create(batch.advanced(next_tokens, places), self.backend)
