"""`DeviceFrameSampler`: whole frames in one program on the device, which a CUDA graph can capture.

    records    | first code: may exclude a stop frame's | later codes | forced codes | text id |
    program    head's logits ─> code 0 ─> depth decoder ─> logits ─> code 1 ─> …

A sampled code advances its record, so that the codes of a frame get the numbers that `FrameSampler`
uses. The records of first codes have the index of the frame, by which penalties count. Only a model
with delays has forced codes, and only its requests need their earlier frames on the host. Penalties
then also count the codes that forced ones have replaced. A text id goes from the request's record
into the frame, and so into the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.memory.transfer import to_device
from llm.request import SamplingParams, Token
from llm.sampling.device.records import RECORD, RECORD_WORDS
from llm.sampling.device.sampler import DevicePlan, DeviceSampler
from llm.sampling.frames import (
    FrameDecoder,
    FrameRules,
    decode_frames,
    for_first_codes,
    for_later_codes,
    forced_codes,
    text_ids,
)
from llm.sampling.logits import TokenMask
from llm.sampling.rng import skip
from llm.sampling.sampler import CapturedSampling


class DeviceFramePlan(NamedTuple):
    """Plans for the first and for the later codes of each row."""

    halves: tuple[DevicePlan, DevicePlan]
    forced: np.ndarray | None  # int32 [K, rows], as in `FramePlan`
    texts: np.ndarray | None  # int32 [rows], as in `FramePlan`


class DeviceFrameSampler(FrameRules[DeviceFramePlan]):
    """Sampler of up to `max_rows` frames, over fixed memory.

    First codes of `num_histories` penalised requests are kept at once, see `DeviceSampler`, also
    for `level`.
    """

    def __init__(
        self,
        decoder: FrameDecoder,
        device: torch.device,
        max_rows: int,
        num_histories: int,
        level: int = 0,
    ) -> None:
        self._shape = shape = decoder.shape
        self.may_need_tokens = shape.delays is not None
        count, size = shape.num_codebooks, shape.codebook_size
        self._samplers = [
            DeviceSampler(size, device, max_rows, num_histories, level=level),
            DeviceSampler(shape.later_size or size, device, max_rows, 1, level=level),
        ]
        self._buffers = [sampler.create_buffers() for sampler in self._samplers]
        for sampler, buffers in zip(self._samplers, self._buffers, strict=True):
            sampler.warm_up(buffers)
        pairs = tuple(zip(self._samplers, self._buffers, strict=True))
        given_words = (count if shape.delays is not None else 0) + (shape.text_size > 0)

        def draw(records: Tensor, logits: Tensor, code: int) -> Tensor:
            place = min(code, 1)
            sampler, buffers = pairs[place]
            out = torch.empty(len(logits), dtype=torch.int32, device=device)
            return sampler.sample(logits, buffers, records[place], out)

        def program(logits: Tensor, records: Tensor, states: Tensor | None) -> Tensor:
            words, num_rows = records.flatten(), len(logits)
            end = 2 * num_rows * RECORD_WORDS
            halves = words[:end].view(2, num_rows, RECORD_WORDS)
            given = words[end:].view(given_words, num_rows)
            forced = given[:count] if shape.delays is not None else None
            texts = given[-1] if shape.text_size else None
            return decode_frames(decoder, logits, states, partial(draw, halves), forced, texts)

        # Without `self`: a reference cycle would keep the memory until garbage collection.
        self._program = program
        self.captured = CapturedSampling(program, 2 * RECORD_WORDS + given_words)

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenSampler`."""
        super().admit(sampling)
        self._samplers[0].check(sampling)

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`: forced codes are computed on the host."""
        return self.may_need_tokens

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> DeviceFramePlan:
        """See `TokenSampler`."""
        plans, count = [], self._shape.num_codebooks
        may_end, later = self._shape.delays is not None, self._shape.later_size
        parameters = [
            [for_first_codes(row.sampling) for row in rows],
            [for_later_codes(row.sampling, later, may_end=may_end) for row in rows],
        ]
        for place, sampler in enumerate(self._samplers):
            pairs = zip(rows, parameters[place], strict=True)
            plan = sampler.prepare([row._replace(sampling=own) for row, own in pairs], step)
            records = plan.records.view(RECORD)
            passed = records["index"] * (count - 1) + place
            records["stream"] = skip(records["stream"], passed)
            plans.append(plan)
        return DeviceFramePlan(
            (plans[0], plans[1]),
            forced_codes(self._shape, rows, sampled),
            text_ids(self._shape, rows, step),
        )

    def load(self, plan: DeviceFramePlan, records: np.ndarray) -> None:
        """See `TokenSampler`."""
        words, num_rows = records.reshape(-1), len(records)
        end = 2 * num_rows * RECORD_WORDS
        halves = words[:end].reshape(2, num_rows, RECORD_WORDS)
        for place, half in enumerate(plan.halves):
            self._samplers[place].write(half, self._buffers[place], halves[place])
        given = words[end:].reshape(-1, num_rows)
        given[:] = 0  # the ids of padding rows
        if plan.forced is not None:
            given[: len(plan.forced), : plan.forced.shape[1]] = plan.forced
        if plan.texts is not None:
            given[-1, : len(plan.texts)] = plan.texts

    def sample(self, logits: Tensor, plan: DeviceFramePlan, states: Tensor | None = None) -> Tensor:
        """See `TokenSampler`."""
        for place, half in enumerate(plan.halves):
            self._samplers[place].load(half, self._buffers[place])
        words = [buffers.records[: len(logits)].flatten() for buffers in self._buffers]
        given = (found for found in (plan.forced, plan.texts) if found is not None)
        words += [to_device(torch.from_numpy(found), logits.device).flatten() for found in given]
        records = torch.cat(words)
        return self._program(logits, records, states)

    def release(self, request_id: str) -> None:
        """See `TokenSampler`."""
        for sampler in self._samplers:
            sampler.release(request_id)
