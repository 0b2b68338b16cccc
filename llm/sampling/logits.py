"""From logits to tokens on the device, for a group of rows with the same candidates and method.

    penalties, bitmask ─> candidates ─> temperature, top-k, top-p, min-p ─> a random number picks

Every row is computed independently, so that no result depends on the batch. Sums that decide are
float64. min-p and top-p cut the distribution that top-k leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from llm.request import IdRange, SamplingParams

HEAD_SIZE = 1024  # most likely tokens that are tried before a whole row is sorted


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of n pairs of a row and a generated id: all tensors are [n]."""

    rows: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply_(self, logits: Tensor) -> None:
        """Penalise logits [B, V] in place.

        Repetition divides positive logits and multiplies negative ones (Keskar et al. 2019);
        frequency is subtracted for each occurrence, presence once.
        """
        values = logits[self.rows, self.ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        logits[self.rows, self.ids] = values - self.frequency * self.counts - self.presence


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Allowed tokens of n rows: one bit per token, lowest first."""

    rows: Tensor  # int64 [n]
    words: Tensor  # int32 [n, ⌈V / 32⌉]

    def apply_(self, logits: Tensor) -> None:
        """Set logits [B, V] of tokens that are not allowed to −∞, in place."""
        # Bytes take a quarter of the time of words; all supported devices are little-endian.
        octets = self.words.view(torch.uint8).unsqueeze(2)
        bits = 2 ** torch.arange(8, dtype=torch.uint8, device=octets.device)
        banned = (octets & bits).flatten(1)[:, : logits.shape[1]] == 0
        logits[self.rows] = logits[self.rows].masked_fill_(banned, -torch.inf)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Sorted, disjoint, half-open id ranges. Column c of their logits is id `ids[c]`."""

    ranges: tuple[IdRange, ...]

    @property
    def width(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def take(self, logits: Tensor) -> Tensor:
        """Return logits [B, width] of the candidates: a view of [B, V] if they are one range."""
        if len(self.ranges) == 1:
            start, end = self.ranges[0]
            return logits[:, start:end]
        return torch.cat([logits[:, start:end] for start, end in self.ranges], dim=1)

    def ids_of(self, columns: Tensor) -> Tensor:
        """Return token ids of columns [B]."""
        if len(self.ranges) == 1:
            return columns + self.ranges[0][0]
        return _ids(self.ranges, columns.device)[columns]


def candidates(sampling: SamplingParams, num_generated: int, vocab_size: int) -> Candidates:
    """Return the ids that may be sampled after `num_generated` tokens.

    Stop ids are always candidates, regardless of `allowed_ranges`, but not before `min_tokens` and
    not inside a cycle. With a JSON schema the bitmask restricts all ids.
    """
    if sampling.json_schema:
        return Candidates(((0, vocab_size),))
    may_stop, allowed = num_generated >= sampling.min_tokens, sampling.allowed_ranges
    if sampling.allowed_cycle:
        place = num_generated % len(sampling.allowed_cycle)
        may_stop, allowed = may_stop and place == 0, sampling.allowed_cycle[place]
    return _candidates(allowed, sampling.stop_token_ids, may_stop, vocab_size)


@lru_cache(maxsize=256)
def _candidates(
    allowed: tuple[IdRange, ...], stop_ids: tuple[int, ...], may_stop: bool, vocab_size: int
) -> Candidates:
    ranges = list(allowed or ((0, vocab_size),))
    stops = [(stop, stop + 1) for stop in stop_ids if 0 <= stop < vocab_size]
    merged = _merge(ranges + stops) if may_stop else _without(_merge(ranges), stops)
    # A request may allow only its stop ids: then they are the candidates also before min_tokens.
    return Candidates(tuple(merged or _merge(stops)))


def _merge(ranges: list[IdRange]) -> list[IdRange]:
    merged: list[IdRange] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _without(ranges: list[IdRange], holes: list[IdRange]) -> list[IdRange]:
    for hole_start, hole_end in holes:
        kept = []
        for start, end in ranges:
            kept += [(start, min(end, hole_start)), (max(start, hole_end), end)]
        ranges = [(start, end) for start, end in kept if start < end]
    return ranges


@lru_cache(maxsize=64)
def _ids(ranges: tuple[IdRange, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in ranges])


class Method(Enum):
    """Sampling method of a row."""

    GREEDY = "greedy"
    TOP_K = "top_k"
    TOP_P = "top_p"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class SamplingGroup:
    """n rows with the same candidates and method, and the parameters of each: float64 [n, 1]."""

    candidates: Candidates
    method: Method
    top_k: int  # for `Method.TOP_K`
    index: Tensor | None  # int64 [n] among the sampling rows; None: all rows, in order
    temperature: Tensor  # > 0
    top_p: Tensor  # above 1: keep all tokens
    min_p: Tensor
    uniform: Tensor  # in [0, 1)
    cuts: bool = True  # whether top_p or min_p can drop tokens

    def of(self, rows: Tensor) -> SamplingGroup:
        """Return the group of the rows [m] of this one."""
        return replace(
            self,
            index=rows if self.index is None else self.index[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniform=self.uniform[rows],
        )

    def sample(self, logits: Tensor) -> Tensor:
        """Return token ids [n] for the logits [n, V] of the rows."""
        is_whole = self.candidates.ranges == ((0, logits.shape[1]),)
        allowed = logits if is_whole else self.candidates.take(logits)
        match self.method:
            case Method.GREEDY:
                columns = allowed.argmax(dim=1)
            case Method.TOP_K:
                columns = sample_top_k(allowed, self)
            case Method.TOP_P:
                columns = sample_top_p(allowed, self)
            case Method.ANY:
                columns = sample_any(allowed, self)
        return columns if is_whole else self.candidates.ids_of(columns)


def sample_top_k(logits: Tensor, group: SamplingGroup) -> Tensor:
    """Draw a column [B] of each row of logits [B, W] from its `top_k` best."""
    values, columns = torch.topk(logits, min(group.top_k, logits.shape[1]), dim=1)
    probabilities = torch.softmax(values.double() / group.temperature, dim=1)
    if group.cuts:
        probabilities = cut_sorted(probabilities, group)
    return columns.gather(1, pick(probabilities, group.uniform)).flatten()


def sample_top_p(logits: Tensor, group: SamplingGroup) -> Tensor:
    """Draw a column [B] of each row from its nucleus (Holtzman et al. 2020).

    A nucleus among the `HEAD_SIZE` best is found without sorting the row.
    """
    probabilities = probabilities_of(logits, group)
    width = logits.shape[1]
    best = torch.topk(probabilities, min(HEAD_SIZE, width), dim=1)
    picked = pick(cut_sorted(best.values, group), group.uniform)
    columns = best.indices.gather(1, picked).flatten()
    if width > HEAD_SIZE:
        reached = best.values.sum(1, dtype=torch.float64)
        wide = (reached < group.top_p.flatten()).nonzero().flatten()
        if len(wide):
            values, order = probabilities[wide].sort(dim=1, descending=True, stable=True)
            others = group.of(wide)
            picked = pick(cut_sorted(values, others), others.uniform)
            columns[wide] = order.gather(1, picked).flatten()
    return columns


def sample_any(logits: Tensor, group: SamplingGroup) -> Tensor:
    """Draw a column [B] of each row from all that is not below min_p times the largest."""
    probabilities = probabilities_of(logits, group)
    if not group.cuts:
        return pick(probabilities, group.uniform).flatten()
    floor = probabilities.amax(1, True) * group.min_p
    return pick(probabilities.where(probabilities >= floor, 0.0), group.uniform).flatten()


def probabilities_of(logits: Tensor, group: SamplingGroup) -> Tensor:
    return torch.softmax(logits / group.temperature.to(logits.dtype), dim=1)


def cut_sorted(probabilities: Tensor, group: SamplingGroup) -> Tensor:
    """Return descending probabilities [B, K] in which those that top_p and min_p drop are 0.

    top_p keeps every token before which less than top_p has accumulated: always the first. For a
    group whose parameters can drop tokens (`cuts`).
    """
    before = probabilities.cumsum(1, dtype=torch.float64) - probabilities
    kept = (before < group.top_p) & (probabilities >= group.min_p * probabilities[:, :1])
    return probabilities.where(kept, 0.0)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a column [B, 1] by inverse cumulative distribution; weights [B, K] need not sum to 1."""
    cumulative = weights.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # uniform < 1, but the product may round up to the total, which no cumulative sum exceeds.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    columns = torch.searchsorted(cumulative, target, right=True)
    return columns.clamp_(max=weights.shape[1] - 1)  # a row of NaN must not affect the others
