"""`AttentionBackend`: plan one forward's reads and writes of the KV pool, then run each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from llm.batch import ForwardBatch
from llm.kv_cache.kv_pool import KVPool

PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """Causal attention of a ragged batch over pages. The plan is a value; layers share it."""

    def __init__(self, pool: KVPool, windows: Sequence[int | None] = ()) -> None:
        """`windows`, by layer: a query sees that many keys, its own included; None: all of them.

        Without any, every layer sees all.
        """
        self.pool = pool
        self.windows = tuple(windows) or (None,) * pool.num_layers

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> PlanT:
        """What every layer of this forward needs to know. Called once for each forward."""

    @abstractmethod
    def forward(self, plan: PlanT, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [T, 2, Hkv, D] keys and values, answer queries [T, H, D] with [T, H × D]."""


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

    def advanced(self, next_tokens: Tensor) -> PlannedAttention[PlanT]:
        """The plan for the decode forward that feeds `next_tokens` [B]."""
        return self.create(self.forward_batch.advanced(next_tokens), self.backend)
