"""`FrameSampler`: the K codes of a frame, one after the other, with the request's parameters.

    head ─> code 0 ─┐    FrameDecoder       K - 1 times: the next code's logits, given the codes
    hidden state ───┴──> logits ─> code 1   before it
                         logits ─> code 2   …

Code k of frame n is drawn with the number n × K + k of the request's seed. Log-probabilities are
those of code 0, whose logits are the language model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.errors import RequestError
from llm.memory.transfer import to_device
from llm.request import FrameShape, SamplingParams, Token
from llm.sampling.logits import Candidates, SamplingGroup, TokenMask, candidates
from llm.sampling.rng import uniforms
from llm.sampling.sampler import Sampler, SamplingPlan, TokenSampler, has_penalties


class FrameInProgress(Protocol):
    """Frames of B rows, of which some codes are known."""

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows `codes` [B]."""


class FrameDecoder(Protocol):
    """The part of a model that decodes the codes of a frame after the first."""

    @property
    def shape(self) -> FrameShape: ...

    def begin(self, hidden: Tensor) -> FrameInProgress:
        """Begin frames at the language model's normalised hidden states [B, H]."""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Plans for the K codes of each row."""

    codes: tuple[SamplingPlan, ...]


class FrameSampler(TokenSampler[FramePlan]):
    """Sampler of frames: `sample` draws their first codes, `complete` the others."""

    may_need_tokens = False

    def __init__(self, decoder: FrameDecoder, device: torch.device) -> None:
        self.shape = decoder.shape
        self._decoder = decoder
        self._device = device
        self._sampler = Sampler(self.shape.codebook_size, device)

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenSampler`."""
        refused = (
            (has_penalties(sampling), "penalties, which count single tokens"),
            (sampling.allowed_cycle, "allowed_cycle: the codes of a frame have one position"),
            (sampling.json_schema, "json_schema: it writes no text"),
            (sampling.echo, "echo: it computes no logits of its prompt's tokens"),
        )
        for is_asked, reason in refused:
            if is_asked:
                raise RequestError(f"a model of frames does not support {reason}")

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`: no code depends on earlier frames."""
        return False

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> FramePlan:
        """See `TokenSampler`."""
        count, size = self.shape.num_codebooks, self.shape.codebook_size
        already = np.array([len(row.output_ids) + step for row in rows], dtype=np.uint64)
        numbers = np.arange(count, dtype=np.uint64)[:, None] + already * np.uint64(count)
        seeds = [row.sampling.seed for row in rows] * count
        drawn = uniforms(seeds, numbers.flatten().tolist()).reshape(count, len(rows))
        firsts = [first_codes(row, done, size) for row, done in zip(rows, already, strict=True)]
        others = [candidates(_without_stops(row.sampling), 0, size) for row in rows]
        first = SamplingPlan(len(rows), self._sampler.groups(rows, firsts, drawn[0]), None)
        groups = self._sampler.groups(rows, others, drawn[0])
        columns = to_device(torch.from_numpy(drawn[:, :, None]), self._device)
        later = (
            SamplingPlan(len(rows), tuple(_redrawn(group, column) for group in groups), None)
            for column in columns[1:]
        )
        return FramePlan((first, *later))

    def sample(self, logits: Tensor, plan: FramePlan) -> Tensor:
        """See `TokenSampler`: the first code of each frame."""
        return self._sampler.sample(logits, plan.codes[0])

    def complete(self, first: Tensor, hidden: Tensor | None, plan: FramePlan) -> Tensor:
        """Return int32 [B, K] frames of which the `first` codes [B] are given."""
        assert hidden is not None  # a model with a frame decoder returns it
        frames = [first]
        if len(first):
            progress = self._decoder.begin(hidden)
            for codes in plan.codes[1:]:
                logits = progress.next_logits(frames[-1].long())
                frames.append(self._sampler.sample(logits, codes))
        else:
            frames *= len(plan.codes)
        return torch.stack(frames, dim=1)


def first_codes(row: ScheduledRow, num_frames: int, size: int) -> Candidates:
    """Return the codes that may begin the row's next frame.

    The first code of a stop frame is excluded before `min_tokens` frames.
    """
    return candidates(_with_first_stops(row.sampling), num_frames, size)


@lru_cache(maxsize=256)
def _with_first_stops(sampling: SamplingParams) -> SamplingParams:
    stops = tuple(stop if isinstance(stop, int) else stop[0] for stop in sampling.stop_token_ids)
    return replace(sampling, stop_token_ids=stops)


@lru_cache(maxsize=256)
def _without_stops(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, stop_token_ids=(), min_tokens=0)


def _redrawn(group: SamplingGroup, column: Tensor) -> SamplingGroup:
    """Return the group with the random numbers of another code, [rows, 1]."""
    return replace(group, uniform=column if group.index is None else column[group.index])
