"""`Candidates`: the ids that one request may sample next, as slices of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from llm.request import IdRange, SamplingParams


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
