"""`AttentionBackend`: plan one forward's reads and writes of the KV pool, then run each layer.

A forward is planned in one of two ways:

    plan = backend.plan(batch)                   any batch; the plan is used for this forward only
    plan = backend.capture_plan(shape, context)  once; a plan over tensors that stay in place
    backend.replan(plan, batch)                  before each forward: other rows, the same tensors

The second is for CUDA graphs. `capture_plan` and `replan` are called outside of the graph,
`forward` is captured and replayed, and reads what the last `replan` wrote. A captured forward
computes as many tokens as its `CapturedShape` has; a batch may have fewer, and the rest pad:

    token that pads    slot 0, and whatever it sees is in page 0, which belongs to no request

Plans of one backend may share memory: the plan that was made or pointed at rows last is the one
whose forwards may run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from llm.batch import ForwardBatch, KVSlots
from llm.kv_cache.kv_pool import KVPool
from llm.memory_copy import to_device
from llm.memory_staging import Section

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """What a captured forward has room for: rows of one token each, then rows of any lengths.

        no prompts    | row 0 | row 1 | … | pad |
        prompts       | pad | … | row 0 | row 1 | prompt … prompt … | pad |
                                                └ token `num_singles`

    Either way the tokens of a batch are neighbours, in the order of its rows.
    """

    num_singles: int
    num_prompts: int = 0
    num_prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Of a forward, those that pad included."""
        return self.num_singles + self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Of a forward, those that pad included."""
        return self.num_singles + self.num_prompts

    def has_room(self, num_singles: int, num_prompts: int, num_prompt_tokens: int) -> bool:
        """For so many leading rows of one token, and the rest of a batch."""
        return (
            num_singles <= self.num_singles
            and num_prompts <= self.num_prompts
            and num_prompt_tokens <= self.num_prompt_tokens
        )

    def first_token(self, num_singles: int) -> int:
        """Where a batch with so many leading rows of one token begins."""
        return self.num_singles - num_singles if self.num_prompts else 0


class PlanMemory(NamedTuple):
    """What a captured plan's forwards read, in memory that somebody else sends to the device."""

    slots: Tensor  # int64 [shape.num_tokens], of every token: of those that pad, too
    tables: Section  # int32, at least `table_words` of them, for `replan` to write


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
    can_capture_prompts: bool = False  # whether those know shapes with prompts

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

    def table_words(self, shape: CapturedShape, max_context: int) -> int:
        """Most int32 numbers that `replan` writes to the tables of `PlanMemory`."""
        return 0

    def capture_plan(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None = None
    ) -> PlanT:
        """A plan for batches that a shape has room for, with contexts up to `max_context`.

        `memory`: where what its forwards read lies; None: the plan has memory of its own. Until the
        first `replan` every token pads.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def replan(self, plan: PlanT, batch: ForwardBatch) -> None:
        """Point a plan of `capture_plan` at another batch that its shape has room for.

        Its work is queued on the current stream, behind the forwards that still read the plan;
        the host never waits for the device. `batch` may be forgotten afterwards, its tensors too.
        Tables in the memory of `capture_plan` are only written: whoever owns it sends them.
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
