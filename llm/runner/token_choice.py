"""`TokenChoice`: from logits to tokens, prepared on the host and made on the device.

HostChoice      a plan for each step (`Sampler`): on the CPU, and where drafts are verified
DeviceChoice    one program over fixed memory (`DeviceSampler`): on a GPU. It counts the tokens
                it draws itself, so that penalties need no tokens on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from llm.batch import ScheduledRow
from llm.errors import RequestError
from llm.request import SamplingParams
from llm.sampling.device.records import RECORD_WORDS
from llm.sampling.device.sampler import MAX_WINDOW, DevicePlan, DeviceSampler
from llm.sampling.logits import TokenMask
from llm.sampling.sampler import Sampler, SamplingPlan, has_penalties

PlanT = TypeVar("PlanT")
Tokens = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class CapturedSampling:
    """Sampling as a program that can be captured."""

    program: Callable[[Tensor, Tensor], Tensor]
    """Function from logits [B, V] and records int32 [B, record_words] to int32 [B] tokens. The
    record of a padding row is zeros, and its token is 0.
    """

    record_words: int


class TokenChoice(ABC, Generic[PlanT]):
    """Interface of sampling. Every plan is used once, in order of creation."""

    captured: CapturedSampling | None = None
    """Sampling with the loaded parameters; None: it cannot be captured."""

    may_need_tokens = True
    """Whether `needs_tokens` may return True."""

    def admit(self, sampling: SamplingParams) -> None:
        """Raise `RequestError` for unsupported parameters. Thread-safe."""
        return

    @abstractmethod
    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """Whether the host must know a request's tokens to prepare its next one."""

    @abstractmethod
    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Tokens | None = None,
        mask: TokenMask | None = None,
    ) -> PlanT:
        """Plan the next token of each row, `step` tokens after its `output_ids`.

        `sampled` are those tokens, by row, where they must be known. `mask` restricts rows to a
        grammar.
        """

    def load(self, plan: PlanT, records: np.ndarray) -> None:
        """Write a plan's parameters for the captured program, behind the work that the device has
        queued.

        Includes the records of all rows, with padding rows.
        """
        raise NotImplementedError(f"{type(self).__name__} has no program")

    @abstractmethod
    def choose(self, logits: Tensor, plan: PlanT) -> Tensor:
        """Return int32 [B] token ids, owned by the caller, for logits [B, V], which are not
        changed.
        """

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect for unknown ids."""
        return


class HostChoice(TokenChoice[SamplingPlan]):
    """Sampling with a plan per step; see the module."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenChoice`."""
        return has_penalties(sampling)

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Tokens | None = None,
        mask: TokenMask | None = None,
    ) -> SamplingPlan:
        """See `TokenChoice`."""
        return self._sampler.prepare(rows, step, sampled, mask)

    def choose(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        """See `TokenChoice`."""
        return self._sampler.sample(logits, plan)


class DeviceChoice(TokenChoice[DevicePlan]):
    """Sampling with one program on the device; see the module."""

    may_need_tokens = False

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._buffers = buffers = sampler.create_buffers()
        sampler.warm_up(buffers)
        # Without `self`: a reference cycle would keep the memory until garbage collection.
        self.captured = CapturedSampling(
            lambda logits, records: sampler.sample(logits, buffers, records), RECORD_WORDS
        )

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenChoice`."""
        if not self._sampler.can_follow(sampling):
            raise RequestError(
                f"penalty_window={sampling.penalty_window} must be at most {MAX_WINDOW} on a GPU, "
                "or 0 for the whole output"
            )

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenChoice`."""
        return False

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Tokens | None = None,
        mask: TokenMask | None = None,
    ) -> DevicePlan:
        """See `TokenChoice`."""
        return self._sampler.prepare(rows, step, mask)

    def load(self, plan: DevicePlan, records: np.ndarray) -> None:
        """See `TokenChoice`."""
        self._sampler.write(plan, self._buffers, records)

    def choose(self, logits: Tensor, plan: DevicePlan) -> Tensor:
        """See `TokenChoice`."""
        self._sampler.load(plan, self._buffers)
        return self._sampler.sample(logits, self._buffers).clone()  # the buffers own the original

    def release(self, request_id: str) -> None:
        """See `TokenChoice`."""
        self._sampler.release(request_id)
