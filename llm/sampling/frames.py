"""`FrameSampler`: the K codes of a frame, one after the other, with the request's parameters.

    head ─> code 0 ─┐    FrameDecoder       K - 1 times: the next code's logits, given the codes
    hidden state ───┴──> logits ─> code 1   before it
                         logits ─> code 2   …

Code k of frame n is drawn with the number n × K + k of the request's seed. Log-probabilities are
those of code 0, whose logits are the language model's. Penalties count first codes, and change the
logits of first codes. `SamplingParams.later_codes` are the parameters of the others. Where the
model's delays force a code it replaces the one that was drawn, before the next code of the frame is
decoded; a request's earlier frames then must be known. A frame's text id is not drawn: the request
has it, so that it is known before the frame is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import ScheduledRow
from llm.delays import FREE
from llm.errors import RequestError
from llm.memory.transfer import to_device
from llm.request import FrameShape, SamplingParams, Token, first_codes
from llm.sampling.logits import Penalties, SamplingGroup, TokenMask, candidates
from llm.sampling.rng import uniforms
from llm.sampling.sampler import PlanT, Sampler, SamplingPlan, TokenSampler, has_penalties

MAX_KNOWN = 4096  # requests whose parameters of single codes are kept


class FrameInProgress(Protocol):
    """Frames of B rows, of which some codes are known."""

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows int32 `codes` [B].

        V is the size of the code's codebook.
        """


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
    forced: Tensor | None  # int32 [K, B], `FREE` where the code is drawn; None: none is forced
    texts: Tensor | None  # int32 [B] text ids of the frames; None: they have none


class FrameRules(TokenSampler[PlanT]):
    """Requests that a model of frames runs: those without restrictions on single positions."""

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenSampler`."""
        check_sampling(sampling)


class FrameSampler(FrameRules[FramePlan]):
    """Sampler of frames, with a plan for each step."""

    def __init__(self, decoder: FrameDecoder, device: torch.device) -> None:
        self.shape = decoder.shape
        self._decoder = decoder
        self._device = device
        self._sampler = Sampler(self.shape.codebook_size, device)

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`: penalties and forced codes are computed on the host."""
        return self.shape.delays is not None or has_penalties(sampling)

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> FramePlan:
        """See `TokenSampler`."""
        count, size = self.shape.num_codebooks, self.shape.codebook_size
        already = [len(row.output_ids) + step for row in rows]
        numbers = [done * count + code for code in range(count) for done in already]
        seeds = [row.sampling.seed for row in rows] * count
        drawn = uniforms(seeds, numbers).reshape(count, len(rows))
        pairs = zip(rows, already, strict=True)
        firsts = [candidates(for_first_codes(row.sampling), done, size) for row, done in pairs]
        may_end = self.shape.delays is not None
        others = [
            row._replace(
                sampling=for_later_codes(row.sampling, self.shape.later_size, may_end=may_end)
            )
            for row in rows
        ]
        groups = self._sampler.groups(rows, firsts, drawn[0])
        first = SamplingPlan(len(rows), groups, self._penalties(rows, sampled))
        allowed = [
            candidates(row.sampling, done, size) for row, done in zip(others, already, strict=True)
        ]
        groups = self._sampler.groups(others, allowed, drawn[0])
        columns = to_device(torch.from_numpy(drawn[:, :, None]), self._device)
        later = (
            SamplingPlan(len(rows), tuple(_redrawn(group, column) for group in groups), None)
            for column in columns[1:]
        )
        forced, texts = (
            None if found is None else to_device(torch.from_numpy(found), self._device)
            for found in (
                forced_codes(self.shape, rows, sampled),
                text_ids(self.shape, rows, step),
            )
        )
        return FramePlan((first, *later), forced, texts)

    def _penalties(
        self, rows: Sequence[ScheduledRow], sampled: Sequence[Sequence[Token]] | None
    ) -> Penalties | None:
        """Return the penalties of first codes."""
        if not any(has_penalties(row.sampling) for row in rows):
            return None
        own = [
            row._replace(output_ids=first_codes(row.output_ids))
            if has_penalties(row.sampling)
            else row
            for row in rows
        ]
        return self._sampler.penalties(own, sampled and [first_codes(some) for some in sampled])

    def sample(self, logits: Tensor, plan: FramePlan, states: Tensor | None = None) -> Tensor:
        """See `TokenSampler`: int32 [B, `FrameShape.num_ids`]."""

        def draw(logits: Tensor, code: int) -> Tensor:
            missing = self.shape.codebook_size - logits.shape[1]
            if missing:  # of a codebook that is smaller than the first
                logits = F.pad(logits, (0, missing), value=-math.inf)
            return self._sampler.sample(logits, plan.codes[code])

        return decode_frames(self._decoder, logits, states, draw, plan.forced, plan.texts)


def decode_frames(
    decoder: FrameDecoder,
    logits: Tensor,
    states: Tensor | None,
    draw: Callable[[Tensor, int], Tensor],
    forced: Tensor | None = None,
    texts: Tensor | None = None,
) -> Tensor:
    """Return int32 [B, `FrameShape.num_ids`] frames; `draw` samples code k of all rows from its
    logits [B, V].

    `logits` are those of the first codes, `states` [B, H] the language model's hidden states.
    Codes in `forced`, int32 [K, B], that are not `FREE` replace the drawn ones. `texts`, int32 [B],
    are the frames' text ids.
    """
    assert states is not None  # a model with a frame decoder returns them
    count = decoder.shape.num_codebooks
    if not len(logits):
        return logits.new_empty(0, decoder.shape.num_ids, dtype=torch.int32)

    def chosen(logits: Tensor, code: int) -> Tensor:
        drawn = draw(logits, code)
        return drawn if forced is None else torch.where(forced[code] == FREE, drawn, forced[code])

    codes = [chosen(logits, 0)]
    frames = decoder.begin(states)
    for code in range(1, count):
        codes.append(chosen(frames.next_logits(codes[-1]), code))
    drawn = torch.stack(codes if texts is None else [*codes, texts], dim=1)
    if decoder.shape.ends_at_first_code:
        drawn[:, 1:] *= drawn[:, :1] != decoder.shape.end[0]
    return drawn


def forced_codes(
    shape: FrameShape, rows: Sequence[ScheduledRow], sampled: Sequence[Sequence[Token]] | None
) -> np.ndarray | None:
    """Return int32 [K, B] codes of the rows' next frames, see `FrameDelays.forced`; None for a
    model without delays.

    `sampled` are tokens of each row after its `output_ids`.
    """
    delays = shape.delays
    if delays is None:
        return None
    before = (
        [*row.output_ids, *(sampled[place] if sampled else ())] for place, row in enumerate(rows)
    )
    codes = [
        delays.forced(generated, ends=not row.sampling.ignore_eos)
        for generated, row in zip(before, rows, strict=True)
    ]
    return np.array(codes, dtype=np.int32).reshape(-1, shape.num_codebooks).T.copy()


def text_ids(shape: FrameShape, rows: Sequence[ScheduledRow], step: int) -> np.ndarray | None:
    """Return int32 [B] text ids of the rows' next frames; None for frames without one.

    `step` is the number of frames of each row after its `output_ids`.
    """
    if not shape.text_size:
        return None
    pairs = ((row.sampling.frame_texts, len(row.output_ids) + step) for row in rows)
    texts = [own[done] if done < len(own) else shape.text_pad for own, done in pairs]
    return np.array(texts, dtype=np.int32)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise `RequestError` for parameters that a model of frames does not support."""
    refused = (
        (sampling.allowed_cycle, "allowed_cycle: the codes of a frame have one position"),
        (sampling.json_schema, "json_schema: it writes no text"),
        (sampling.echo, "echo: it computes no logits of its prompt's tokens"),
    )
    for is_asked, reason in refused:
        if is_asked:
            raise RequestError(f"a model of frames does not support {reason}")


@lru_cache(maxsize=MAX_KNOWN)
def for_first_codes(sampling: SamplingParams) -> SamplingParams:
    """Return the parameters of first codes: those of stop frames wait for `min_tokens` frames."""
    stops = tuple(stop if isinstance(stop, int) else stop[0] for stop in sampling.stop_token_ids)
    return replace(sampling, stop_token_ids=stops)


@lru_cache(maxsize=MAX_KNOWN)
def for_later_codes(sampling: SamplingParams, size: int, *, may_end: bool) -> SamplingParams:
    """Return the parameters of the other codes: none is penalised.

    `size`: that of their codebooks, 0 if it is the first one's; ranges without any of their codes
    allow all. `may_end`: with delays any codebook may be the first to end, else none of
    the others ends a sequence.
    """
    own = sampling.later_codes or sampling
    if may_end:
        sampling = for_first_codes(sampling)
    else:
        sampling = replace(sampling, stop_token_ids=(), min_tokens=0)
    if size and sampling.allowed_ranges:
        ranges = [(start, min(end, size)) for start, end in sampling.allowed_ranges if start < size]
        sampling = replace(sampling, allowed_ranges=tuple(ranges))
    return replace(
        sampling,
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        later_codes=None,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
    )


def _redrawn(group: SamplingGroup, column: Tensor) -> SamplingGroup:
    """Return the group with the random numbers of another code, [rows, 1]."""
    return replace(group, uniform=column if group.index is None else column[group.index])
