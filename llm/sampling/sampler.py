"""`Sampler`: prepare a plan on the host; sample on the device.

Rows with the same candidates and method form one group and share their calls. A row's token depends
on its logits, its parameters, its seed and the index of the token, never on its position in the
batch. Order of operations: penalties, bitmask, candidates, temperature, top-k, top-p, min-p (the
last two on the distribution that top-k leaves).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.memory.transfer import to_device
from llm.request import SamplingParams
from llm.sampling.candidates import Candidates, candidates
from llm.sampling.logits import (
    DrawParameters,
    Penalties,
    TokenMask,
    sample_any,
    sample_top_k,
    sample_top_p,
)
from llm.sampling.rng import uniforms

KEEP_ALL = 2.0  # a top_p that no accumulated probability reaches
# below this, logits over temperature overflow, and the result is argmax
MIN_TEMPERATURE = 1e-6


class Method(Enum):
    """Sampling method of a row."""

    GREEDY = "greedy"
    TOP_K = "top_k"
    TOP_P = "top_p"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with the same method and candidates, and their indices among the sampling rows."""

    candidates: Candidates
    method: Method
    top_k: int
    index: Tensor | None  # int64 [n]; None: all rows, in order
    draw: DrawParameters


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Plan for sampling the rows of one forward."""

    num_rows: int
    groups: tuple[Group, ...]
    penalties: Penalties | None
    mask: TokenMask | None = None


class Sampler:
    """Sampler for logits [B, vocab_size] on `device`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[int]] | None = None,
        mask: TokenMask | None = None,
    ) -> SamplingPlan:
        """Plan the next token of each row, `step` tokens after its `output_ids`.

        `sampled` are those tokens, by row; only rows with penalties use them. `mask` restricts rows
        to a grammar.
        """
        already = [len(row.output_ids) + step for row in rows]
        members: dict[tuple[Candidates, Method, int], list[int]] = {}
        for place, row in enumerate(rows):
            allowed = candidates(row.sampling, already[place], self.vocab_size)
            members.setdefault((allowed, *_method(row.sampling)), []).append(place)
        uniform = uniforms([row.sampling.seed for row in rows], already)
        groups = tuple(self._group(key, places, rows, uniform) for key, places in members.items())
        penalties = None
        if any(has_penalties(row.sampling) for row in rows):
            penalties = self._penalties(rows, sampled)
        return SamplingPlan(len(rows), groups, penalties, mask)

    def _group(
        self,
        key: tuple[Candidates, Method, int],
        places: list[int],
        rows: Sequence[ScheduledRow],
        uniform: np.ndarray,
    ) -> Group:
        params = [rows[place].sampling for place in places]
        numbers = [
            [p.temperature, p.top_p if p.top_p < 1 else KEEP_ALL, p.min_p, float(uniform[place])]
            for p, place in zip(params, places, strict=True)
        ]
        table = to_device(torch.tensor(numbers, dtype=torch.float64), self._device)
        index = None
        if len(places) != len(rows):
            index = to_device(torch.tensor(places), self._device)
        temperature, top_p, min_p, uniforms_ = table.split(1, dim=1)
        cuts = any(p.top_p < 1 or p.min_p > 0 for p in params)
        return Group(*key, index, DrawParameters(temperature, top_p, min_p, uniforms_, cuts))

    def _penalties(
        self, rows: Sequence[ScheduledRow], sampled: Sequence[Sequence[int]] | None
    ) -> Penalties | None:
        entries = []
        for place, row in enumerate(rows):
            if has_penalties(row.sampling):
                generated = [*row.output_ids, *(sampled[place] if sampled else ())]
                entries.append(_penalised(place, row.sampling, generated))
        if not any(len(entry[0]) for entry in entries):
            return None
        rows_ids_counts = np.concatenate([entry[0] for entry in entries]).T
        factors = np.concatenate([entry[1] for entry in entries]).T
        numbers = to_device(torch.from_numpy(rows_ids_counts.copy()), self._device)
        places, ids, counts = numbers
        return Penalties(
            places, ids, counts, *to_device(torch.from_numpy(factors.copy()), self._device)
        )

    def sample(self, logits: Tensor, plan: SamplingPlan) -> Tensor:
        """Return int32 [B] token ids for logits [B, V], which are not changed."""
        logits = adjusted(logits, plan)
        if len(plan.groups) == 1:
            return _choose(plan.groups[0], logits).int()
        token_ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        for group in plan.groups:
            token_ids[group.index] = _choose(group, logits[group.index]).int()
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


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the most likely token is always chosen."""
    return sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1


def _method(sampling: SamplingParams) -> tuple[Method, int]:
    if is_greedy(sampling):
        return Method.GREEDY, 0
    if sampling.top_k > 0:
        return Method.TOP_K, sampling.top_k
    return (Method.TOP_P if sampling.top_p < 1 else Method.ANY), 0


def _penalised(
    place: int, sampling: SamplingParams, generated: list[int]
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


def _choose(group: Group, logits: Tensor) -> Tensor:
    """Return token ids [n] of the group's rows."""
    allowed = group.candidates.take(logits)
    match group.method:
        case Method.GREEDY:
            columns = allowed.argmax(dim=1)
        case Method.TOP_K:
            columns = sample_top_k(allowed, group.top_k, group.draw)
        case Method.TOP_P:
            columns = sample_top_p(allowed, group.draw)
        case Method.ANY:
            columns = sample_any(allowed, group.draw)
    return group.candidates.ids_of(columns)
