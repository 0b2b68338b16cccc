"""`AttentionBackend`: plan one forward's reads and writes of the KV pool, then run each layer.

A forward is planned in one of two ways:

    plan = backend.plan(batch)                   any batch; the plan is used for this forward only
    plan = backend.capture_plan(shape, context)  once; a plan over tensors that stay in place
    backend.replan(plan, batch)                  before each forward: other rows, the same tensors

The second is for CUDA graphs. `capture_plan` and `replan` are called outside of the graph,
`forward` is captured and replayed, and reads what the last `replan` wrote. A captured forward
computes as many tokens as its `CapturedShape` has; a batch may have fewer, the rest is padding:

    padding token      slot 0; it attends to page 0, which belongs to no request

Plans of one backend may share memory: only the forwards of the plan that was created or updated
last may run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import ForwardBatch, KVSlots
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from llm.memory.staging import Section
from llm.memory.transfer import to_device

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class CapturedShape:
    """Size of a captured forward: rows of one token each, then rows of any lengths.

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
        """Number of tokens of a forward, with padding."""
        return self.num_singles + self.num_prompt_tokens

    @property
    def num_rows(self) -> int:
        """Number of rows of a forward, with padding."""
        return self.num_singles + self.num_prompts

    def has_room(self, num_singles: int, num_prompts: int, num_prompt_tokens: int) -> bool:
        """Whether a batch with so many leading rows of one token fits."""
        return (
            num_singles <= self.num_singles
            and num_prompts <= self.num_prompts
            and num_prompt_tokens <= self.num_prompt_tokens
        )

    def first_token(self, num_singles: int) -> int:
        """Return the first token of a batch with so many leading rows of one token."""
        return self.num_singles - num_singles if self.num_prompts else 0


@dataclass(frozen=True, slots=True)
class AttentionLoad:
    """Sizes of the largest forward, and of the model, from which its scratch is estimated."""

    num_rows: int
    num_tokens: int  # of all rows
    context_len: int  # longest context of a row
    expected_len: int  # usual context of a row
    num_layers: int  # with keys and values
    num_kv_heads: int
    num_groups: int  # query heads of a KV head
    head_dim: int
    itemsize: int  # bytes of a query's value
    kv_itemsize: int  # bytes of a stored key's or value's
    windows: tuple[int | None, ...] = ()  # of the layers


class PlanMemory(NamedTuple):
    """Inputs of a captured plan's forwards, in memory that the caller sends to the device."""

    slots: Tensor  # int64 [shape.num_tokens], with padding tokens
    tables: Section  # int32, at least `table_words` of them, written by `replan`


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A model's attention parameters, and how attention is computed."""

    num_heads: int  # of queries
    dtype: torch.dtype  # of queries and of the results
    # By layer: number of keys that a query attends to, with its own; None: all. (): all layers
    # attend to all.
    windows: tuple[int | None, ...] = ()
    soft_cap: float | None = None  # scores s become c × tanh(s / c)
    enable_pdl: bool = False  # FlashInfer's kernels may start before the previous one has ended
    # launch level of the built-in kernels for rows of one query, see `KernelSet`; None: not used
    decode_level: int | None = None
    batch_invariant: bool = False  # the order of sums of a row does not depend on the other rows
    max_rows: int = 1024  # of a captured forward, at most


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention of a ragged batch over pages. Layers share a plan."""

    name: ClassVar[str]  # name in the registry
    can_capture: bool = False  # whether `capture_plan` and `replan` are implemented
    can_capture_prompts: bool = False  # whether they support shapes with prompts

    def __init__(self, pool: KVPool, options: AttentionOptions) -> None:
        self.pool = pool
        self.options = options
        self.windows = options.windows or (None,) * pool.num_layers

    @property
    def description(self) -> str:
        """Name of the backend, and details of its computation."""
        return self.name

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlanT:
        """Plan a forward for all layers. Called once for each forward."""

    @abstractmethod
    def forward(self, plan: PlanT, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [T, 2, Hkv, D] keys and values; attend with queries [T, H, D]; return [T, H ×
        D].
        """

    def slots(self, plan: PlanT) -> Tensor | None:
        """Return int64 [T] slots that `forward` stores in; None when it keeps copies elsewhere."""
        return None

    def attend(self, plan: PlanT, layer: int, query: Tensor) -> Tensor:
        """Like `forward`, for keys and values that are in their `slots` already."""
        raise NotImplementedError(f"{type(self).__name__} stores keys and values itself")

    def table_words(self, shape: CapturedShape, max_context: int) -> int:
        """Return the maximum number of int32 numbers that `replan` writes to the tables of
        `PlanMemory`.
        """
        return 0

    def capture_plan(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None = None
    ) -> PlanT:
        """Create a plan for batches that fit a shape, with contexts up to `max_context`.

        `memory`: the inputs of its forwards; None: the plan allocates them. Until the first
        `replan` every token is padding.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def replan(self, plan: PlanT, batch: ForwardBatch) -> None:
        """Update a plan of `capture_plan` for another batch that fits its shape.

        The work is queued on the current stream, behind the forwards that still read the plan; the
        host never waits for the device. `batch` and its tensors may be freed afterwards. Tables in
        the memory of `capture_plan` are only written: its owner sends them.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")


@dataclass(frozen=True, slots=True)
class PlannedAttention(Generic[PlanT]):
    """A backend and its plan for one forward, passed to models as `kv_cache_inputs`."""

    forward_batch: ForwardBatch
    backend: AttentionBackend[PlanT]
    plan: PlanT
    marks: LayerMarks | None = None
    """Where the layers note that their keys and values are stored; None: nothing waits for it."""

    @classmethod
    def create(
        cls,
        batch: ForwardBatch,
        backend: AttentionBackend[PlanT],
        marks: LayerMarks | None = None,
    ) -> PlannedAttention[PlanT]:
        """Plan `batch`."""
        return cls(batch, backend, backend.plan(batch), marks)

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Run one layer."""
        attended = self.backend.forward(self.plan, layer, query, key_value)
        if self.marks is not None:
            self.marks.note(layer)
        return attended

    def slots(self, layer: int) -> KVSlots | None:
        """Return where a kernel may store one layer's keys and values before `attend_stored`.

        None for float8 pages that the device's kernels cannot convert to: `KVPool.write` does.
        """
        slots, pool = self.backend.slots(self.plan), self.backend.pool
        if slots is None or (pool.dtype.itemsize == 1 and not pool.kernels_take_float8):
            return None
        return KVSlots(pool.keys(layer), pool.values(layer), slots)

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """Run one layer whose keys and values are in their slots."""
        if self.marks is not None:
            self.marks.note(layer)
        return self.backend.attend(self.plan, layer, query)

    def advanced(self, next_tokens: Tensor) -> PlannedAttention[PlanT]:
        """Return the plan for the decode forward that feeds `next_tokens` [B]."""
        batch = self.forward_batch
        places = to_device(torch.tensor(batch.next_places()), batch.positions.device)
        return self.create(batch.advanced(next_tokens, places), self.backend)


def attend_contiguous(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, soft_cap: float | None
) -> Tensor:
    """Return attention of queries [.., Q, D] over keys and values [.., L, D]: [.., Q, D].

    `mask` is added to the scores. With a soft cap c, which maps scores s to c × tanh(s / c),
    everything is computed in float32. The result has the queries' format.
    """
    if soft_cap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    scores = query.float() @ keys.float().transpose(-1, -2) * query.shape[-1] ** -0.5
    capped = soft_cap * torch.tanh(scores / soft_cap)
    return ((capped + mask).softmax(-1) @ values.float()).to(query.dtype)
