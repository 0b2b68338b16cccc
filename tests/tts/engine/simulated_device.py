"""A server's scheduler, decode loop and streams on a simulated device, with its listeners.

    arrivals ─▶ scheduler ─▶ step ─┐ both share the device: each slows the other
    listeners ◀─ decode loop ◀─ call┘

The device is a clock. A step takes `step_s`, and more for each row and each prompt token; a decoder
call `call_s`, and more for each frame of each row that its graph has (a power of two). The host
plans and starts a step while the former one runs, as a server with overlap does, and needs time for
each step, row and window. The numbers are those of one H200 (benchmarks/RESULTS.md), and what one
costs the other is chosen so that 240 streams of Orpheus and 750 of Llasa without `--pace-streams`
have the rows of a step and steps per second that were measured with the decoders' kernels of then,
which took up to three times as long as today's.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, partial
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
from llm import Request, SamplingParams, Token, TokenChunk
from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.kv_cache.manager import KVCacheManager
from llm.runner.graphs.shapes import decode_shapes, prompt_shapes
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import Sequence as LiveSequence
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.decode_loop import DecodeLoop
from tts.engine.pacer import DeadlinePacer, DecodePacer
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream

HOST_S = 0.0012  # of the host for a step, while another one may run
HOST_ROW_S = 1.1e-5  # and for each of its rows
HOST_WINDOW_S = 2.4e-4  # of the host for a window, with its way to the client's process
POLL_S = 0.0002
WAY_S = 0.003  # from the engine to the client
BESIDE_STEPS = 0.6  # speed of a call while a step runs
IDLE = ScheduledBatch((), ForwardMode.IDLE)
BLOCKS = 8  # rendered ones that wait for their reader, as in a server
CODES_AHEAD = 100  # tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and a codec: their options, and their times on one H200 in seconds."""

    name: str
    spec: CodecSpec
    streaming: StreamingOptions
    prompt_len: int
    step_s: float
    row_s: float  # of a row: its keys and values
    token_s: float  # of a fed token, or of one that fills a captured shape
    call_s: float
    frame_s: float  # of a row
    beside_calls: float  # speed of a step while a call runs, relative to that of a step alone
    max_batch: int = 32  # windows of a call
    most: int = 1024  # rows of a step

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
        rows = len(batch.rows)
        num_prompts = sum(row.is_extend for row in batch.rows)
        prompts = sum(len(row.token_ids) for row in batch.rows if row.is_extend)
        if num_prompts:
            num_tokens = fed_tokens(rows - num_prompts, prompts, self.most)
        else:
            num_tokens = next(
                each.num_singles for each in decode_shapes(self.most) if each.num_singles >= rows
            )
        return self.step_s + self.row_s * rows + self.token_s * num_tokens

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


@lru_cache
def fed_tokens(rows: int, prompt_tokens: int, most: int) -> int:
    """Return the number of tokens of the captured step that holds these; they alone in others."""
    shapes = prompt_shapes(most, 8192)
    fitting = (
        each.num_tokens
        for each in shapes
        if each.num_singles >= rows and each.num_tokens - each.num_singles >= prompt_tokens
    )
    return next(fitting, rows + prompt_tokens)


def _padded(count: int) -> int:
    """Return the number of rows of the smallest graph."""
    return 1 << max(count - 1, 0).bit_length()


SNAC = CodecSpec("none", 24_000, Fraction(2048, 7), 4096, layout=(0, 1, 2, 2, 1, 2, 2))
XCODEC2 = CodecSpec("none", 16_000, Fraction(320), 65_536)
QWEN = CodecSpec("none", 24_000, Fraction(120), 2048, layout=tuple(range(16)), keeps_state=True)
_SHAPES = (
    Shape(
        "b",
        SNAC,
        StreamingOptions((7, 7, 14, 21, 28, 42, 56), 28, look_ahead=14, first_look_ahead=0),
        prompt_len=72,
        step_s=2.2e-3,
        row_s=8e-6,
        token_s=5e-6,
        call_s=1.2e-3,
        frame_s=2.2e-5,
        beside_calls=0.33,
    ),
    Shape(
        "a",
        XCODEC2,
        StreamingOptions((4, 6, 10, 15, 25), 50, look_ahead=5, first_look_ahead=0),
        prompt_len=109,
        step_s=0.9e-3,
        row_s=3.5e-6,
        token_s=1.8e-6,
        call_s=1.5e-3,
        frame_s=5.1e-6,
        beside_calls=0.48,
    ),
    Shape(
        "qwen",
        QWEN,
        StreamingOptions((16, 16, 32, 64, 128)),
        prompt_len=70,
        step_s=3.5e-3,
        row_s=4e-6,
        token_s=1.8e-5,
        call_s=2.3e-3,
        frame_s=5.5e-5,
        beside_calls=0.4,
        max_batch=64,
    ),
)
SHAPES = {shape.name: shape for shape in _SHAPES}


class Device:
    """A clock, a step and decoder calls that share a device."""

    def __init__(self, beside_calls: float) -> None:
        self.now_s = 1000.0
        self._beside_calls = beside_calls
        self._steps: deque[float] = deque()  # left of each step, on a device of its own
        self.num_steps = 0  # that have ended
        self._calls: deque[SimulatedResult] = deque()

    def __call__(self) -> float:
        return self.now_s

    @property
    def has_step(self) -> bool:
        """Whether a step runs."""
        return bool(self._steps)

    def start_step(self, seconds: float) -> None:
        """Start a step, behind those that run."""
        self._steps.append(seconds)

    def start_call(self, call: SimulatedResult) -> None:
        """Queue a decoder call."""
        self._calls.append(call)

    def advance(self, limit_s: float) -> None:
        """Advance to that time, or to the earlier end of the step or of a call."""
        step_speed = self._beside_calls if self._calls else 1.0
        call_speed = BESIDE_STEPS if self.has_step else 1.0
        ends = [limit_s]
        if self.has_step:
            ends.append(self.now_s + self._steps[0] / step_speed)
        if self._calls:
            ends.append(self.now_s + self._calls[0].left_s / call_speed)
        spent_s = max(min(ends) - self.now_s, 0.0)
        self.now_s += spent_s
        if self.has_step:
            self._steps[0] = _less(self._steps[0], spent_s * step_speed)
            if not self._steps[0]:
                self._steps.popleft()
                self.num_steps += 1
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

    def __init__(
        self,
        scheduler: Scheduler,
        device: Device,
        renderer: SimulatedRenderer,
        pacer: DecodePacer,
    ) -> None:
        super().__init__(SchedulerControl(scheduler), renderer.decoder, pacer=pacer, clock=device)
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


class Steps:
    """The engine's steps on the simulated device, planned while the former one runs."""

    def __init__(self, shape: Shape, device: Device) -> None:
        most = shape.most
        longest = 2048
        self.scheduler = Scheduler(
            SchedulerLimits(max_batch_size=most),
            KVCacheManager(most * longest // 128, 128),
            max_seq_len=longest,
            plan_ahead=True,
            clock=device,
        )
        self.rows: list[int] = []
        """Number of rows of each step."""
        self._shape, self._device = shape, device
        self._in_flight: deque[ScheduledBatch] = deque()
        self._num_started = 0
        self.num_tokens = 0  # of each sequence, in the newest results

    @property
    def is_running(self) -> bool:
        """Whether the results of a step have not arrived yet."""
        return bool(self._in_flight)

    def step(self, loop: SimulatedLoop, *, waits: bool) -> list[TokenChunk] | None:
        """Start a step unless the model waits; return the chunks of the former one.

        None: there was neither.
        """
        self.num_tokens = 0
        device, batch = self._device, IDLE if waits else self.scheduler.schedule()
        if not (batch.rows or self._in_flight):
            return None
        if batch.rows:
            device.wait(HOST_S + HOST_ROW_S * len(batch.rows) / 2)
            device.start_step(self._shape.step_cost_s(batch))
            self.rows.append(len(batch.rows))
            self._num_started += 1
        chunks: list[TokenChunk] = []
        if self._in_flight:
            done = self._in_flight.popleft()
            num_ended = self._num_started - bool(batch.rows)
            while device.num_steps < num_ended:
                device.advance(math.inf)
                loop.while_waiting(lambda: not (device.num_steps < num_ended and loop.has_rendered))
            device.wait(HOST_ROW_S * len(done.rows) / 2)
            output = StepOutput({row.request_id: (1,) for row in done.rows if row.samples})
            chunks = self.scheduler.commit(done, output)
            self.num_tokens = int(bool(output.token_ids))
        if batch.rows:
            self._in_flight.append(batch)
            self.scheduler.launched(batch)
        return chunks


@dataclass(slots=True)
class Simulation:
    """A server of one shape on a simulated device."""

    shape: Shape
    pacer: DecodePacer = field(default_factory=DeadlinePacer)
    device: Device = field(init=False)
    listeners: list[Listener] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = Device(self.shape.beside_calls)

    async def run(self, streams: int, *, seconds: float, warm_up_s: float, seed: int = 1) -> Result:
        """Play so many streams at once, on average, of 2 to 6.4 s each."""
        random, device, shape = Random(seed), self.device, self.shape
        steps = Steps(shape, device)
        scheduler, renderer = steps.scheduler, SimulatedRenderer(device, shape)
        loop = SimulatedLoop(scheduler, device, renderer, self.pacer)
        start_s, due_s = device.now_s, device.now_s
        end_s = start_s + warm_up_s + seconds
        playing: dict[str, Listener] = {}
        while playing or due_s < end_s:
            while due_s <= device.now_s and due_s < end_s:
                length_s = random.uniform(2.0, 6.4)
                listener = self._speak(loop, scheduler, due_s, length_s, len(self.listeners))
                playing[listener.stream.request_id] = listener
                due_s += random.expovariate(streams / 4.2)
            waits = loop.may_wait(scheduler.num_live, has_step=steps.is_running)
            chunks = steps.step(loop, waits=waits)
            for chunk in chunks or ():
                loop.on_tokens(playing[chunk.request_id].stream, chunk)
            num_windows = sum(renderer.num_windows)
            loop.after_step(steps.num_tokens)
            device.wait(HOST_WINDOW_S * (sum(renderer.num_windows) - num_windows))
            for request_id, listener in list(playing.items()):
                await listener.read(device.now_s + WAY_S, shape.spec.sample_rate)
                if listener.has_ended:
                    del playing[request_id]
            await asyncio.sleep(0)
            if chunks is None:
                device.wait(POLL_S)
        spent_s = device.now_s - start_s
        counted = [one for one in self.listeners if one.due_s >= start_s + warm_up_s]
        return Result(
            tuple(one.first_s or math.inf for one in counted),
            tuple(one.late_s for one in counted),
            statistics.fmean(steps.rows),
            statistics.fmean(renderer.num_windows),
            len(steps.rows) / spent_s,
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
        sequence = LiveSequence(request, due_s)
        sequence.buffer = stream.buffer
        scheduler.add(sequence)
        self.listeners.append(Listener(due_s, stream))
        return self.listeners[-1]
