"""An audio worker on a ramp codec, driven step by step: tests push tokens and read blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import torch

from decoder import AudioDecoder, DecodeWindow, StreamingOptions, create_decoder
from llm import FinishReason, Request, TokenChunk
from tests.fakes import OffsetCodes
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.decode_loop import DecodeLoop, RangeProfiler
from tts.engine.pacer import DecodePacer
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream, TextStream

HOP = 640
OFFSET = 1000  # id of code 0
BAD_CODE = 4000


class EngineLog:
    """An engine control that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))

    def pause(self, request_id: str) -> None:
        self.calls.append(("pause", request_id))

    def resume(self, request_id: str) -> None:
        self.calls.append(("resume", request_id))

    def wake(self) -> None:
        pass


class WatchedDecoder(AudioDecoder):
    """A ramp codec that keeps the shape of every call and fails on BAD_CODE.

    `pads`: it renders windows of any shape together.
    """

    def __init__(self, *, pads: bool = False, keeps_state: bool = False) -> None:
        self._inner = create_decoder("ramp")
        self._pads = pads
        self.spec = replace(self._inner.spec, keeps_state=keeps_state)
        self.batches: list[int] = []

    def batch_key(self, window: DecodeWindow) -> Hashable:
        return None if self._pads else super().batch_key(window)

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        self.batches.append(len(windows))
        if any(BAD_CODE in window.codes for window in windows):
            raise RuntimeError("no such sound")
        return self._inner.decode(windows)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A worker, its streams and the blocks that their readers got."""

    def __init__(
        self,
        capacity: int = 8,
        max_codes_ahead: int = 100,
        profiler: RangeProfiler | None = None,
        *,
        pads: bool = False,
        keeps_state: bool = False,
        pacer: DecodePacer | None = None,
    ) -> None:
        self.decoder = WatchedDecoder(pads=pads, keeps_state=keeps_state)
        self.engine = EngineLog()
        self.clock = Clock()
        clock = self.clock if pacer else time.monotonic
        self.worker = DecodeLoop(self.engine, self.decoder, profiler, pacer=pacer, clock=clock)
        self._setup = SpeechSetup(self.decoder.spec, OffsetCodes(OFFSET), max_codes_ahead)
        self._capacity = capacity

    def speak(
        self,
        request_id: str = "a",
        sizes: tuple[int, ...] | None = (2, 3, 4),
        buffer: int = 0,
        carry: tuple[int, ...] | None = None,
    ) -> SpeechStream:
        job = SpeechJob(
            Request(request_id, (1,)), StreamingOptions(sizes, buffer=buffer), carry=carry
        )
        queue: StreamQueue[AudioBlock] = StreamQueue(self._capacity)
        task = SpeechStream(job, self._setup, queue)
        queue.on_room = partial(self.worker.mark_dirty, task)
        self.worker.add(task)
        return task

    def write(self, request_id: str = "t") -> TextStream:
        queue: StreamQueue[TokenChunk] = StreamQueue(self._capacity)
        task = TextStream(request_id, queue)
        queue.on_room = partial(self.worker.mark_dirty, task)
        self.worker.add(task)
        return task

    def turns(self) -> int:
        count = 0
        while self.worker.after_step():
            count += 1
            assert count < 100, "the worker never rests"
        return count


def tokens(task: SpeechStream | TextStream, *codes: int, end: FinishReason | None = None) -> None:
    ids = tuple(OFFSET + code for code in codes)
    task.on_tokens(TokenChunk(task.request_id, ids, finish_reason=end, output_tokens=len(ids)))


async def read(task: SpeechStream) -> list[AudioBlock]:
    return [await task.queue.get() for _ in range(len(task.queue))]


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), timeout=60)

    asyncio.run(bounded())


def numbers(blocks: Sequence[AudioBlock]) -> list[tuple[int, int, int, int]]:
    return [(b.first_code, b.num_codes, b.first_sample, len(b.samples)) for b in blocks]
