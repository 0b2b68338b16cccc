"""`Sampler`: prepare a plan on the host; sample on the device.

Rows with the same candidates and method form one group and share their calls. A row's token depends
on its logits, its parameters, its seed and the index of the token, never on its position in the
batch. Order of operations: penalties, bitmask, candidates, temperature, top-k, top-p, min-p (the
last two on the distribution that top-k leaves).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.memory.transfer import to_device
from llm.request import IdRange, SamplingParams, Token, as_ids
from llm.sampling.logits import (
    Candidates,
    Method,
    Penalties,
    SamplingGroup,
    TokenMask,
    candidates,
    cut_sorted,
    probabilities_of,
)
from llm.sampling.rng import uniforms

PlanT = TypeVar("PlanT")

KEEP_ALL = 2.0  # a top_p that no accumulated probability reaches
# below this, logits over temperature overflow, and the result is argmax
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Plan for sampling the rows of one forward."""

    num_rows: int
    groups: tuple[SamplingGroup, ...]
    penalties: Penalties | None
    mask: TokenMask | None = None


@dataclass(frozen=True, slots=True)
class CapturedSampling:
    """Sampling as a program that can be captured."""

    program: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Function from logits [B, V], records int32 [B, record_words] and, for frames, hidden states
    [B, H] to int32 tokens [B] or frames [B, K]. The record of a padding row is zeros, and its
    token is 0.
    """

    record_words: int
    needed_ids: Callable[[np.ndarray], IdRange] | None = None
    """Function that returns the range of ids whose logits rows with these records need; None: all.
    """


class TokenSampler(ABC, Generic[PlanT]):
    """From logits to tokens, prepared on the host and done on the device.

    Every plan is used once, in order of creation.

    Sampler           a plan for each step: on the CPU, and where drafts are verified
    BufferedSampler   one program over fixed memory: on a GPU. It counts the tokens that it draws
                      itself, so that penalties need no tokens on the host.
    FrameSampler, DeviceFrameSampler   the same for frames
    """

    captured: CapturedSampling | None = None
    """Sampling with the loaded parameters; None: it cannot be captured."""

    may_need_tokens = True
    """Whether `needs_tokens` may return True."""

    def warm_up(self) -> None:
        """Compile what the first plan would wait for."""
        return

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
        sampled: Sequence[Sequence[Token]] | None = None,
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
    def sample(self, logits: Tensor, plan: PlanT, states: Tensor | None = None) -> Tensor:
        """Return int32 [B] token ids, or [B, K] frames, owned by the caller, for logits [B, V],
        which are not changed. Frames need the hidden `states` [B, H] of the logits.
        """

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect for unknown ids."""
        return


class Sampler(TokenSampler[SamplingPlan]):
    """Sampler for logits [B, vocab_size] on `device`, with a plan for each step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`: penalties are computed on the host."""
        return has_penalties(sampling)

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> SamplingPlan:
        """See `TokenSampler`; only rows with penalties use the tokens `sampled`."""
        already = [len(row.output_ids) + step for row in rows]
        size, pairs = self.vocab_size, zip(rows, already, strict=True)
        allowed = [candidates(row.sampling, count, size) for row, count in pairs]
        uniform = uniforms([row.sampling.seed for row in rows], already)
        groups = self.groups(rows, allowed, uniform)
        penalties = None
        if any(has_penalties(row.sampling) for row in rows):
            penalties = self.penalties(rows, sampled)
        return SamplingPlan(len(rows), groups, penalties, mask)

    def groups(
        self, rows: Sequence[ScheduledRow], allowed: Sequence[Candidates], uniform: np.ndarray
    ) -> tuple[SamplingGroup, ...]:
        """Group rows by their `allowed` candidates and their method; `uniform` float64 [rows]."""
        members: dict[tuple[Candidates, Method, int], list[int]] = {}
        for place, row in enumerate(rows):
            members.setdefault((allowed[place], *method_of(row.sampling)), []).append(place)
        return tuple(self._group(key, places, rows, uniform) for key, places in members.items())

    def _group(
        self,
        key: tuple[Candidates, Method, int],
        places: list[int],
        rows: Sequence[ScheduledRow],
        uniform: np.ndarray,
    ) -> SamplingGroup:
        params = [rows[place].sampling for place in places]
        numbers = [
            [p.temperature, p.top_p if p.top_p < 1 else KEEP_ALL, p.min_p, float(uniform[place])]
            for p, place in zip(params, places, strict=True)
        ]
        table = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        index = None
        if len(places) != len(rows):
            index = to_device(torch.tensor(places), self._device)
        temperature, top_p, min_p, drawn = table.split(1, dim=1)
        cuts = any(p.top_p < 1 or p.min_p > 0 for p in params)
        allowed, method, top_k = key
        return SamplingGroup(
            candidates=allowed,
            method=method,
            top_k=top_k,
            index=index,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            uniform=drawn,
            cuts=cuts,
        )

    def penalties(
        self, rows: Sequence[ScheduledRow], sampled: Sequence[Sequence[Token]] | None
    ) -> Penalties | None:
        """Return the penalties of the rows that have some, None if they have no tokens yet."""
        entries = []
        for place, row in enumerate(rows):
            if has_penalties(row.sampling):
                generated = [*row.output_ids, *(sampled[place] if sampled else ())]
                entries.append(_penalised(place, row.sampling, as_ids(generated)))
        if not any(len(entry[0]) for entry in entries):
            return None
        rows_ids_counts = np.concatenate([entry[0] for entry in entries]).T
        factors = np.concatenate([entry[1] for entry in entries]).T
        numbers = to_device(torch.from_numpy(rows_ids_counts.copy()), self._device)
        places, ids, counts = numbers
        return Penalties(
            places, ids, counts, *to_device(torch.from_numpy(factors.copy()), self._device)
        )

    def sample(self, logits: Tensor, plan: SamplingPlan, states: Tensor | None = None) -> Tensor:
        """See `TokenSampler`."""
        logits = adjusted(logits, plan)
        if len(plan.groups) == 1:
            return plan.groups[0].sample(logits).int()
        token_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        for group in plan.groups:
            token_ids[group.index] = group.sample(logits[group.index]).int()
        return token_ids


def adjusted(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Return logits [B, V] after the plan's penalties and bitmask; the input is not changed."""
    if plan.num_rows != len(logits):
        raise ValueError(f"{plan.num_rows} rows planned, {len(logits)} rows of logits")
    if plan.penalties is not None or plan.mask is not None:
        logits = logits.clone()
    if plan.penalties is not None:
        plan.penalties.apply_(logits)
    if plan.mask is not None:
        plan.mask.apply_(logits)
    return logits


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether earlier tokens change the distribution of the next one beyond the model."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def method_of(sampling: SamplingParams) -> tuple[Method, int]:
    """Return how a row is sampled, and its top_k for `Method.TOP_K`."""
    if sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1:
        return Method.GREEDY, 0
    if sampling.top_k > 0:
        return Method.TOP_K, sampling.top_k
    return (Method.TOP_P if sampling.top_p < 1 else Method.ANY), 0


def _penalised(
    place: int, sampling: SamplingParams, generated: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return [n, 3] row, id, count and [n, 3] factors of the ids in the penalty window."""
    window = generated[-sampling.penalty_window :]  # [-0:], for window 0, takes all tokens
    ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
    factors = np.array(
        [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty],
        dtype=np.float32,
    )
    pairs = np.stack([np.full_like(ids, place), ids, counts], axis=1)
    return pairs, np.broadcast_to(factors, (len(ids), 3))


def distribution(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Return float64 [B, V]: the probabilities that `Sampler.sample` draws from, for speculation.

    A greedy row has a single 1.
    """
    logits = adjusted(logits, plan)
    found = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for group in plan.groups:
        rows = torch.arange(len(logits), device=logits.device)
        if group.index is not None:
            rows = group.index
        weights = _weights(group, group.candidates.take(logits[rows]))
        columns = torch.arange(weights.shape[1], device=logits.device)
        ids = group.candidates.ids_of(columns)
        found[rows.unsqueeze(1), ids] = weights / weights.sum(1, keepdim=True)
    return found


def _weights(group: SamplingGroup, allowed: Tensor) -> Tensor:
    """Return float64 [n, W] of the candidates' logits, not normalised."""
    weights = torch.zeros(allowed.shape, dtype=torch.float64, device=allowed.device)
    if group.method is Method.GREEDY:
        return weights.scatter_(1, allowed.argmax(dim=1, keepdim=True), 1.0)
    if group.method is Method.TOP_K:
        values, columns = torch.topk(allowed, min(group.top_k, allowed.shape[1]), dim=1)
        probabilities = torch.softmax(values.double() / group.temperature, dim=1)
    else:
        plain = probabilities_of(allowed, group)
        probabilities, columns = plain.sort(dim=1, descending=True, stable=True)
    if group.cuts:
        probabilities = cut_sorted(probabilities, group)
    return weights.scatter_(1, columns, probabilities.double())
