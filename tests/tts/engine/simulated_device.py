"""A server's scheduler, decode loop and streams on a simulated device, with its listeners.

    arrivals ─▶ scheduler ─▶ step ─┐ both share the device: each slows the other
    listeners ◀─ decode loop ◀─ call┘

The device is a clock. A step takes `step_s`, and more for each row and each prompt token; a decoder
call `call_s`, and more for each frame of each row that its graph has (a power of two). The numbers
are those of one H200 (benchmarks/RESULTS.md), and what one costs the other is chosen so that 192
streams of Qwen3-TTS and 240 of Orpheus have the measured rows of a step and steps per second.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from random import Random

import numpy as np
import torch

from decoder import (
    AudioDecoder,
    CodecSpec,
    DecodeRequest,
    DecodeResult,
    DecoderOptions,
    DecodeWindow,
    Renderer,
    StreamingOptions,
)
from llm import Request, SamplingParams, Token
from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.kv_cache.manager import KVCacheManager
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import Sequence as LiveSequence
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.decode_loop import DecodeLoop
from tts.engine.pacer import DeadlinePacer
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream

TURN_S = 0.001  # of the host, between two steps
POLL_S = 0.0002
WAY_S = 0.003  # from the engine to the client
BESIDE_CALLS = 0.5  # speed of a step while a call runs, relative to that of a step alone
BESIDE_STEPS = 0.6  # speed of a call while a step runs
IDLE = ScheduledBatch((), ForwardMode.IDLE)
BLOCKS = 8  # rendered ones that wait for their reader, as in a server
CODES_AHEAD = 100  # tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a codec: their options, and their times on one H200 in seconds."""

    spec: CodecSpec
    streaming: StreamingOptions
    prompt_len: int
    step_s: float
    row_s: float
    prompts_s: float  # of a step with prompts, besides their tokens
    prompt_token_s: float
    call_s: float
    frame_s: float  # of a row
    max_batch: int = 32  # windows of a call

    @property
    def codes_per_token(self) -> int:
        """A token of a codec with kept states is a frame, else a code."""
        return self.spec.codes_per_frame if self.spec.keeps_state else 1

    @property
    def token_rate(self) -> float:
        """Tokens per second of audio."""
        return self.spec.codes_per_second / self.codes_per_token

    def step_cost_s(self, batch: ScheduledBatch) -> float:
        """Return the duration of a step that has the device for itself."""
        prompts = sum(len(row.token_ids) for row in batch.rows if row.is_extend)
        prompts_s = self.prompts_s * bool(prompts) + self.prompt_token_s * prompts
        return self.step_s + self.row_s * len(batch.rows) + prompts_s

    def call_cost_s(self, ready: Sequence[DecodeRequest]) -> float:
        """Return the duration of a decoder call that has the device for itself."""
        per_frame, sizes = self.spec.codes_per_frame, self.streaming.chunk_sizes or (1,)
        if not self.spec.keeps_state:  # one shape that holds all of them
            return self.call_s + self.frame_s * _padded(len(ready)) * max(sizes) / per_frame
        seen: defaultdict[int, int] = defaultdict(int)  # windows of a stream
        rows: defaultdict[tuple[int, int], int] = defaultdict(int)
        for item in ready:
            seen[id(item.state)] += 1
            rows[seen[id(item.state)], len(item.window.block) // per_frame] += 1
        return sum(
            self.call_s + self.frame_s * frames * _padded(count)
            for (_, frames), count in rows.items()
        )


def _padded(count: int) -> int:
    """Return the number of rows of the smallest graph."""
    return 1 << max(count - 1, 0).bit_length()


SNAC = CodecSpec("none", 24_000, Fraction(2048, 7), 4096, layout=(0, 1, 2, 2, 1, 2, 2))
QWEN = CodecSpec("none", 24_000, Fraction(120), 2048, layout=tuple(range(16)), keeps_state=True)
SHAPES = {
    "b": Shape(
        SNAC,
        StreamingOptions((7, 7, 14, 21, 28, 42, 56), 28, look_ahead=14, first_look_ahead=0),
        prompt_len=72,
        step_s=2.5e-3,
        row_s=1.05e-5,
        prompts_s=5e-4,
        prompt_token_s=1e-5,
        call_s=1.2e-3,
        frame_s=2e-5,
    ),
    "qwen": Shape(
        QWEN,
        StreamingOptions((16, 16, 32, 64, 128)),
        prompt_len=70,
        step_s=3.5e-3,
        row_s=8e-6,
        prompts_s=3e-3,
        prompt_token_s=1e-5,
        call_s=2.3e-3,
        frame_s=5.5e-5,
        max_batch=64,
    ),
}


class Device:
    """A clock, a step and decoder calls that share a device."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._step_s = 0.0  # what is left of the step, on a device of its own
        self._calls: deque[SimulatedResult] = deque()

    def __call__(self) -> float:
        return self.now_s

    @property
    def has_step(self) -> bool:
        """Whether a step runs."""
        return self._step_s > 0

    def start_step(self, seconds: float) -> None:
        """Start a step."""
        self._step_s = seconds

    def start_call(self, call: SimulatedResult) -> None:
        """Queue a decoder call."""
        self._calls.append(call)

    def advance(self, limit_s: float) -> None:
        """Advance to that time, or to the earlier end of the step or of a call."""
        step_speed = BESIDE_CALLS if self._calls else 1.0
        call_speed = BESIDE_STEPS if self.has_step else 1.0
        ends = [limit_s]
        if self.has_step:
            ends.append(self.now_s + self._step_s / step_speed)
        if self._calls:
            ends.append(self.now_s + self._calls[0].left_s / call_speed)
        spent_s = max(min(ends) - self.now_s, 0.0)
        self.now_s += spent_s
        if self.has_step:
            self._step_s = _less(self._step_s, spent_s * step_speed)
        if self._calls:
            call = self._calls[0]
            call.left_s = _less(call.left_s, spent_s * call_speed)
            call.took_s += spent_s
            if call.is_ready:
                self._calls.popleft()

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        limit_s = self.now_s + seconds
        while self.now_s < limit_s:
            self.advance(limit_s)


def _less(left_s: float, spent_s: float) -> float:
    return left_s - spent_s if left_s - spent_s > 1e-9 else 0.0


class SimulatedResult(DecodeResult):
    """Silence, ready when the device has spent the time."""

    took_s = 0.0

    def __init__(self, ready: Sequence[DecodeRequest], seconds: float) -> None:
        self._ready, self.left_s = ready, seconds

    @property
    def is_ready(self) -> bool:
        return self.left_s <= 0

    def samples(self) -> list[np.ndarray]:
        return [np.zeros(item.window.num_samples, np.int16) for item in self._ready]


class SimulatedDecoder(AudioDecoder):
    """A codec that renders on the simulated device."""

    def __init__(self, shape: Shape) -> None:
        self.spec, self.options = shape.spec, DecoderOptions(max_batch=shape.max_batch)
        self.device = "simulated"

    def batch_key(self, window: DecodeWindow) -> Hashable:
        return len(window.block) if self.spec.keeps_state else None

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        raise NotImplementedError


class SimulatedRenderer(Renderer):
    """Renders on the simulated device."""

    def __init__(self, device: Device, shape: Shape) -> None:
        super().__init__(SimulatedDecoder(shape), shape.streaming)
        self._device, self._shape = device, shape
        self.num_windows: list[int] = []
        """Number of windows of each call."""

    def launch(self, ready: Sequence[DecodeRequest]) -> DecodeResult:
        self.num_windows.append(len(ready))
        call = SimulatedResult(ready, self._shape.call_cost_s(ready))
        self._device.start_call(call)
        return call


class SimulatedLoop(DecodeLoop):
    """A decode loop that renders on the simulated device."""

    def __init__(self, scheduler: Scheduler, device: Device, renderer: SimulatedRenderer) -> None:
        super().__init__(
            SchedulerControl(scheduler), renderer.decoder, pacer=DeadlinePacer(), clock=device
        )
        self._renderer = renderer

    @property
    def has_rendered(self) -> bool:
        """Whether the oldest call has ended."""
        return bool(self._launched) and self._launched[0].rendered.is_ready


@dataclass(frozen=True, slots=True)
class SchedulerControl:
    """Operations of the engine on the scheduler itself: there is one thread."""

    scheduler: Scheduler

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def pause(self, request_id: str) -> None:
        self.scheduler.pause(request_id)

    def resume(self, request_id: str) -> None:
        self.scheduler.resume(request_id)

    def wake(self) -> None:
        pass


@dataclass(slots=True)
class Silence:
    """The code map: each token is so many zeros."""

    codes_per_token: int

    def reader(self) -> Callable[[Sequence[Token]], tuple[int, ...]]:
        return lambda tokens: (0,) * (self.codes_per_token * len(tokens))


@dataclass(slots=True)
class Listener:
    """A client that plays its stream from the first audio on. Times in seconds."""

    due_s: float
    stream: SpeechStream
    first_s: float | None = None  # of the first audio, after it was due
    late_s: float = 0.0  # silence after the first audio
    has_ended: bool = False
    _until_s: float = 0.0

    async def read(self, now_s: float, sample_rate: int) -> None:
        """Take the blocks that have been rendered."""
        while len(self.stream.queue):
            block = await self.stream.queue.get()
            if len(block.samples):
                if self.first_s is None:
                    self.first_s, self._until_s = now_s - self.due_s, now_s
                self.late_s += max(0.0, now_s - self._until_s)
                self._until_s = max(self._until_s, now_s) + len(block.samples) / sample_rate
            self.has_ended = block.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of the streams that began after the warm-up, and of the device."""

    first_s: tuple[float, ...]
    late_s: tuple[float, ...]
    rows: float  # of a step, mean
    windows: float  # of a call, mean
    steps_per_s: float
    calls_per_s: float

    @property
    def num_late(self) -> int:
        """Number of streams with silence after their first audio."""
        return sum(late_s > 0 for late_s in self.late_s)


@dataclass(slots=True)
class Simulation:
    """A server of one shape on a simulated device."""

    shape: Shape
    device: Device = field(default_factory=Device)
    listeners: list[Listener] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    async def run(self, streams: int, *, seconds: float, warm_up_s: float, seed: int = 1) -> Result:
        """Play so many streams at once, on average, of 2 to 6.4 s each."""
        random, device, shape = Random(seed), self.device, self.shape
        most, longest = 4 * streams, 2048
        scheduler = Scheduler(
            SchedulerLimits(max_batch_size=most),
            KVCacheManager(most * longest // 128, 128),
            max_seq_len=longest,
            clock=device,
        )
        renderer = SimulatedRenderer(device, shape)
        loop = SimulatedLoop(scheduler, device, renderer)
        start_s, due_s = device.now_s, device.now_s
        playing: dict[str, Listener] = {}
        while playing or due_s < start_s + warm_up_s + seconds:
            while due_s <= device.now_s and due_s < start_s + warm_up_s + seconds:
                length_s = random.uniform(2.0, 6.4)
                listener = self._speak(loop, scheduler, due_s, length_s, len(self.listeners))
                playing[listener.stream.request_id] = listener
                due_s += random.expovariate(streams / 4.2)
            waits = loop.may_wait(scheduler.num_live, has_step=False)
            batch = IDLE if waits else scheduler.schedule()
            if batch.rows:
                device.start_step(shape.step_cost_s(batch))
                while device.has_step:
                    device.advance(math.inf)
                    loop.while_waiting(lambda: not (device.has_step and loop.has_rendered))
                device.wait(TURN_S)
                output = StepOutput({row.request_id: (1,) for row in batch.rows if row.samples})
                self.rows.append(len(batch.rows))
                for chunk in scheduler.commit(batch, output):
                    loop.on_tokens(playing[chunk.request_id].stream, chunk)
            loop.after_step()
            for request_id, listener in list(playing.items()):
                await listener.read(device.now_s + WAY_S, shape.spec.sample_rate)
                if listener.has_ended:
                    del playing[request_id]
            await asyncio.sleep(0)
            if not batch.rows:
                device.wait(POLL_S)
        spent_s = device.now_s - start_s
        counted = [one for one in self.listeners if one.due_s >= start_s + warm_up_s]
        return Result(
            tuple(one.first_s or math.inf for one in counted),
            tuple(one.late_s for one in counted),
            statistics.fmean(self.rows),
            statistics.fmean(renderer.num_windows),
            len(self.rows) / spent_s,
            len(renderer.num_windows) / spent_s,
        )

    def _speak(
        self,
        loop: DecodeLoop,
        scheduler: Scheduler,
        due_s: float,
        length_s: float,
        number: int,
    ) -> Listener:
        shape = self.shape
        count = max(round(length_s * shape.token_rate), 1)
        prompt = tuple(number * 7 % 1000 + index for index in range(shape.prompt_len))
        request = Request(f"{number}", prompt, SamplingParams(min_tokens=count, max_tokens=count))
        setup = SpeechSetup(
            shape.spec, Silence(shape.codes_per_token), CODES_AHEAD * shape.codes_per_token
        )
        queue: StreamQueue[AudioBlock] = StreamQueue(BLOCKS, wakeups=loop.wakeups)
        stream = SpeechStream(SpeechJob(request, shape.streaming), setup, queue)
        queue.on_room = partial(loop.mark_dirty, stream)
        loop.add(stream)
        scheduler.add(LiveSequence(request, due_s))
        self.listeners.append(Listener(due_s, stream))
        return self.listeners[-1]
