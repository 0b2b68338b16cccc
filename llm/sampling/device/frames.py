"""`DeviceFrameSampler`: whole frames in one program on the device, which a CUDA graph can capture.

    records    | first code: its candidates may exclude a stop frame's | later codes |
    program    head's logits ─> code 0 ─> depth decoder ─> logits ─> code 1 ─> …

A sampled code advances its record, so that the codes of a frame get the numbers that `FrameSampler`
uses. The records of first codes have the index of the frame, by which penalties count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledRow
from llm.request import SamplingParams, Token
from llm.sampling.device.records import RECORD, RECORD_WORDS
from llm.sampling.device.sampler import DevicePlan, DeviceSampler
from llm.sampling.frames import (
    FrameDecoder,
    FrameRules,
    decode_frames,
    for_first_codes,
    for_later_codes,
)
from llm.sampling.logits import TokenMask
from llm.sampling.rng import skip
from llm.sampling.sampler import CapturedSampling


class DeviceFramePlan(NamedTuple):
    """Plans for the first and for the later codes of each row."""

    first: DevicePlan
    later: DevicePlan


class DeviceFrameSampler(FrameRules[DeviceFramePlan]):
    """Sampler of up to `max_rows` frames, over fixed memory.

    First codes of `num_histories` penalised requests are kept at once, see `DeviceSampler`.
    """

    may_need_tokens = False

    def __init__(
        self, decoder: FrameDecoder, device: torch.device, max_rows: int, num_histories: int
    ) -> None:
        self._count, size = decoder.shape.num_codebooks, decoder.shape.codebook_size
        self._samplers = [
            DeviceSampler(size, device, max_rows, histories) for histories in (num_histories, 1)
        ]
        self._buffers = [sampler.create_buffers() for sampler in self._samplers]
        for sampler, buffers in zip(self._samplers, self._buffers, strict=True):
            sampler.warm_up(buffers)
        pairs = tuple(zip(self._samplers, self._buffers, strict=True))

        def draw(records: Tensor, logits: Tensor, code: int) -> Tensor:
            place = min(code, 1)
            sampler, buffers = pairs[place]
            # The buffers own the result, and the next code overwrites it.
            return sampler.sample(logits, buffers, records[place]).clone()

        def program(logits: Tensor, records: Tensor, states: Tensor | None) -> Tensor:
            halves = records.view(2, len(logits), RECORD_WORDS)
            return decode_frames(decoder, logits, states, partial(draw, halves))

        # Without `self`: a reference cycle would keep the memory until garbage collection.
        self._program = program
        self.captured = CapturedSampling(program, 2 * RECORD_WORDS)

    def admit(self, sampling: SamplingParams) -> None:
        """See `TokenSampler`."""
        super().admit(sampling)
        self._samplers[0].check(sampling)

    def needs_tokens(self, sampling: SamplingParams) -> bool:
        """See `TokenSampler`."""
        return False

    def prepare(
        self,
        rows: Sequence[ScheduledRow],
        step: int = 0,
        sampled: Sequence[Sequence[Token]] | None = None,
        mask: TokenMask | None = None,
    ) -> DeviceFramePlan:
        """See `TokenSampler`."""
        plans = []
        for place, parameters in enumerate((for_first_codes, for_later_codes)):
            own = [row._replace(sampling=parameters(row.sampling)) for row in rows]
            plan = self._samplers[place].prepare(own, step)
            records = plan.records.view(RECORD)
            passed = records["index"] * (self._count - 1) + place
            records["stream"] = skip(records["stream"], passed)
            plans.append(plan)
        return DeviceFramePlan(*plans)

    def load(self, plan: DeviceFramePlan, records: np.ndarray) -> None:
        """See `TokenSampler`."""
        halves = records.reshape(2, -1, RECORD_WORDS)
        for place, half in enumerate(plan):
            self._samplers[place].write(half, self._buffers[place], halves[place])

    def sample(self, logits: Tensor, plan: DeviceFramePlan, states: Tensor | None = None) -> Tensor:
        """See `TokenSampler`."""
        for place, half in enumerate(plan):
            self._samplers[place].load(half, self._buffers[place])
        records = torch.stack([buffers.records[: len(logits)] for buffers in self._buffers])
        return self._program(logits, records, states)

    def release(self, request_id: str) -> None:
        """See `TokenSampler`."""
        for sampler in self._samplers:
            sampler.release(request_id)
