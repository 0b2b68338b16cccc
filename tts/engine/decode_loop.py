"""Decode loop: renders speech codes between the language model's steps, on the engine's thread.

    engine thread:  step │ turn │ step │ turn │ step …
                           └─ review    changed streams: remove those that are done, pause those
                              │         whose reader lags, resume the others
                              launch    at most one batch: the most urgent windows
                              deliver   the audio that the decoder has rendered
                              wake      the readers of all delivered audio, together

A GPU renders in parallel with the language model's steps, and this loop does not wait for it:
`DecodePacer` determines when a batch is due, so that many windows share a call. The model's next
step may wait for a call (`may_wait`): among few streams for one with a first block, which then has
the device for itself, among many where the pacer allows it. While the host waits for a step, the
audio of calls that end is delivered. A CPU renders a batch while launching it. One batch per turn
delays the next token of other streams by at most one decoder call. Windows are ordered by deadline:
first the streams without audio, by arrival, then the others by the estimated time at which the
client runs out of audio. The cost of a turn depends on the changed streams and on those with
pending windows, not on the number of streams.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count, repeat
from typing import Protocol, TypeAlias

from decoder import AudioDecoder, DecodeRequest, DecodeResult, Renderer, StreamingOptions
from llm import FinishReason, HistogramCounter, RequestError, TokenChunk
from tts.engine.pacer import DecodePacer
from tts.engine.queue import Wakeups
from tts.engine.streams import NOT_STARTED, SpeechStream, StreamTask
from tts.observe.engine_status import AudioStats
from tts.observe.logs import with_fields

logger = logging.getLogger(__name__)

DECODE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BLOCK_BOUNDS = (1, 2, 4, 8, 16, 32)
MAX_LAUNCHED = 2  # batches: one running, one queued
POLL_S = 0.0001  # polling interval of a busy device when there is no other work
SENT_S = 0.001  # the model waits at most this long until a first block has left
START_S = 0.001  # a caller waits at most this long until the first step of a stream is launched
FEW = 8  # requests; fewer wait for first blocks only
Item: TypeAlias = "tuple[SpeechStream, DecodeRequest]"
COMFORT_S = 0.5
"""On a CPU: a stream with this much buffered audio waits for one without its first audio."""


class EngineControl(Protocol):
    """Operations of the engine that the loop uses; callable from any thread."""

    def cancel(self, request_id: str) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    def wake(self) -> None: ...


class RangeProfiler(Protocol):
    """Profiler with named ranges, such as `llm.Profiler`."""

    range: Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """Windows that the decoder is rendering."""

    tasks: Sequence[SpeechStream]  # stream of each window
    rendered: DecodeResult
    started_s: float  # on the loop's clock


class DecodeLoop:
    """Step hook of the engine that serves all of its speech and text streams.

    Turns run on the engine's thread; streams are added and removed from any thread. `streaming` are
    the options of streams without their own (None: the codec's recommended ones). `pacer` None
    launches whenever a window is ready, which is the default for a decoder on a CPU.
    """

    def __init__(
        self,
        engine: EngineControl,
        decoder: AudioDecoder | None,
        profiler: RangeProfiler | None = None,
        *,
        streaming: StreamingOptions | None = None,
        pacer: DecodePacer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._profiler = profiler
        self._clock = clock
        self._decoder = decoder
        self._renderer = Renderer(decoder, streaming) if decoder else None
        is_parallel = decoder is not None and decoder.device != "cpu"
        self._pacer = DecodePacer() if pacer is None and is_parallel else pacer
        self.poll_s = POLL_S if is_parallel else 0.0
        self._max_batch = decoder.options.max_batch if decoder else 0
        has_turns = decoder is not None and decoder.spec.keeps_state and self._pacer is not None
        self._most_of_stream = 1 if has_turns else self._max_batch
        """Windows of one stream that a call should hold: with kept states, each of them is a call
        of the device by itself."""
        self._launched: deque[InFlightBatch] = deque()
        self._tasks: dict[str, StreamTask] = {}
        self._dirty: deque[StreamTask] = deque()  # appended to in any thread
        self._ready: dict[SpeechStream, None] = {}  # streams with a window to launch
        self._awaiting_first_audio: set[SpeechStream] = set()  # streams without their first audio
        self._has_way = False  # in this turn the model makes way for a first block
        self._waits_until_s = -math.inf  # the time until which the model may wait
        self._num_waiting = 0  # live requests of the engine for which it does
        self._changed = threading.Condition()
        self._has_turned = threading.Event()  # a turn has ended since a stream was added
        self.wakeups = Wakeups()
        """Wake-ups of the readers' event loops; each turn flushes them."""
        self._decode_s, self._blocks = (
            HistogramCounter(DECODE_BOUNDS_S),
            HistogramCounter(BLOCK_BOUNDS),
        )
        self._audio_s = 0.0
        self._sample_rate = decoder.spec.sample_rate if decoder else 1

    def __repr__(self) -> str:
        return f"DecodeLoop({self._snapshot()})"

    def has_only(self, tasks: Container[StreamTask]) -> bool:
        """Whether there are streams, and all of them are in `tasks`; callable from any thread."""
        served = self._snapshot()
        return bool(served) and all(task in tasks for task in served)

    @property
    def num_audio_streams(self) -> int:
        """Number of live decoder states."""
        return sum(isinstance(task, SpeechStream) for task in self._snapshot())

    @property
    def rendering_s(self) -> float:
        """Return the seconds since the launch of the oldest batch in flight, 0 without one.

        Callable from any thread."""
        with suppress(IndexError):
            return self._clock() - self._launched[0].started_s
        return 0.0

    def stats(self) -> AudioStats:
        """Return the decoder's statistics since the start; callable from any thread."""
        return AudioStats(
            self._decode_s.snapshot(),
            self._blocks.snapshot(),
            self._audio_s,
            sum(len(task.queue) for task in self._snapshot()),
        )

    def add(self, task: StreamTask) -> None:
        """Add a stream, before its request is submitted."""
        with self._changed:
            former = self._tasks.get(task.request_id)
            if former is not None and not former.is_done:
                raise RequestError(f"request_id '{task.request_id}' is in use")
            self._tasks[task.request_id] = task
            self._has_turned.clear()
            self._waits_until_s = -math.inf  # it may replace another one: their number is the same
        task.notify = self._dirty.append

    def let_start(self) -> None:
        """Wait, for `START_S` at most, until the engine has ended a turn, in which it launches the
        first step of the only stream.

        To be called once its request is submitted, by the thread that has more to do for it:
        otherwise this thread holds the interpreter lock that the engine's needs. Returns at once
        with more streams, and where steps are not launched but run, on a CPU.
        """
        if self._pacer is not None and len(self._tasks) == 1:
            self._has_turned.wait(START_S)

    def remove(self, task: StreamTask) -> None:
        """Remove a stream."""
        with self._changed:
            if self._tasks.get(task.request_id) is task:
                del self._tasks[task.request_id]
            self._changed.notify_all()

    def cancel(self, task: StreamTask) -> None:
        """Cancel a stream whose reader has disconnected; callable from any thread."""
        task.is_abandoned = True
        with self._changed:
            is_served = self._tasks.get(task.request_id) is task
        if is_served:
            self._engine.cancel(task.request_id)
            self.mark_dirty(task)

    def mark_dirty(self, task: StreamTask) -> None:
        """Schedule a review of a stream in the next turn; callable from any thread."""
        self._dirty.append(task)
        self._engine.wake()

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no stream is left; return False after the timeout.

        Callable from any thread but the engine's."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def on_tokens(self, task: StreamTask, chunk: TokenChunk) -> None:
        """Pass generated tokens to a stream, on the engine's thread."""
        try:
            task.on_tokens(chunk)
        except Exception as error:  # else the engine would log it, and the stream would never end
            self._fail(task, error)

    def after_step(self, num_tokens: int = 0) -> bool:
        """Run one turn; return whether there may be more work. `num_tokens`: see `StepHook`."""
        if self._pacer is not None:
            self._pacer.note_turn(self._clock(), num_tokens)
        try:
            dirty = self._dirty
            for task in dict.fromkeys(dirty.popleft() for _ in range(len(dirty))):  # each once
                self._review(task)
            if self._ready or self._launched:
                self._render()
            return bool(self._ready or self._launched or self._dirty)
        finally:
            if not self._has_turned.is_set():  # to set it takes longer
                self._has_turned.set()
            self.wakeups.flush()

    def while_waiting(self, is_done: Callable[[], bool]) -> None:
        """Deliver the audio of calls that end; see `StepHook`.

        The next call is launched after the step, whose tokens complete windows for it.
        """
        while self._launched and not is_done():
            rendered = self._rendered()
            if not rendered:
                time.sleep(POLL_S)
            for batch in rendered:
                self._deliver(batch)
            self.wakeups.flush()

    def may_wait(self, num_live: int, has_step: bool) -> bool:
        """Return whether the model may wait for the decoder; see `StepHook`.

        A full step costs little more than one of a few rows. So while the decoder has the device,
        the model starts no step that no request needs yet, and later ones have more rows. With few
        requests a step in parallel with a call gains less than it delays a first block.
        """
        self._has_way = False
        if self._pacer is None:
            return False
        if num_live < FEW:
            self._has_way = self._makes_way(num_live, has_step)
            return self._has_way
        if not (self._pacer.lets_model_wait and self._launched):
            return False
        now_s = self._clock()
        if num_live != self._num_waiting or now_s >= self._waits_until_s:
            self._num_waiting, self._waits_until_s = num_live, self._first_due_s(now_s, num_live)
        return now_s < self._waits_until_s

    def _makes_way(self, num_live: int, has_step: bool) -> bool:
        """Return whether a first block is being rendered, or completed by a step that runs, and
        all requests are streams of speech.
        """
        is_first = self._renders_first
        if not (is_first or has_step):
            return False
        tasks = [task for task in self._snapshot() if task.is_generating]
        if len(tasks) != num_live or not all(isinstance(task, SpeechStream) for task in tasks):
            return False
        return is_first or any(task.nears_first_audio for task in tasks)

    @property
    def _renders_first(self) -> bool:
        """Whether a first block is in flight."""
        return any(task.is_unheard for batch in self._launched for task in batch.tasks)

    def _first_due_s(self, now_s: float, num_live: int) -> float:
        """Return the time at which the first of so many requests is due, exactly if that is
        later than now.
        """
        assert self._pacer is not None
        tasks, first_s = self._snapshot(), math.inf
        for task in reversed(tasks):  # the newest streams have the least audio
            due_s = self._pacer.prompts_due_s if task.is_new else task.due_s(now_s)
            first_s = min(first_s, due_s)
            if first_s <= now_s:
                return first_s
        if num_live > sum(task.is_generating for task in tasks):
            return -math.inf  # a request that is no stream of this loop
        return first_s

    def _render(self) -> None:
        """Launch at most one batch, and deliver those that are rendered."""
        rendered = self._rendered()
        if self._ready and len(self._launched) < MAX_LAUNCHED:
            self.wakeups.flush()  # text readers need not wait while a CPU renders
            self._launch(self._due(self._clock()))
        for batch in rendered:
            self._deliver(batch)
        if self._has_way and self._renders_first:
            self.wakeups.flush()
            self._launched[0].rendered.wait()  # there is no other work, and polling is later
        for batch in self._rendered():
            self._deliver(batch)

    def on_stop(self) -> None:
        """End the remaining streams when the engine stops."""
        try:
            for task in self._snapshot():
                task.end(FinishReason.CANCELLED)
                self.remove(task)
        finally:
            self.wakeups.flush()

    def _snapshot(self) -> list[StreamTask]:
        with self._changed:
            return list(self._tasks.values())

    def _review(self, task: StreamTask) -> None:
        """Handle a changed stream: remove it when it is over, else pause or resume its sequence."""
        if isinstance(task, SpeechStream):
            task.deliver_end()
            is_over = task.is_done or task.is_abandoned
            if not is_over and task.num_ready:
                if self._pacer is not None and task.held_until_s == NOT_STARTED:
                    task.held_until_s = self._clock() + self._pacer.hold_s(task)
                self._ready[task] = None
            else:
                self._ready.pop(task, None)
            if not is_over and task.awaits_first_audio:
                self._awaiting_first_audio.add(task)
            else:
                self._awaiting_first_audio.discard(task)
        if task.is_done or task.is_abandoned:
            self.remove(task)
            task.mute()
            task.end(FinishReason.CANCELLED)  # the decoder's state of a stream without a reader
        elif task.is_ahead and task.is_generating and not task.is_paused:
            task.is_paused = True
            self._engine.pause(task.request_id)
        elif task.is_paused and not task.is_ahead:
            task.is_paused = False
            self._waits_until_s = -math.inf
            self._engine.resume(task.request_id)

    def _due(self, now_s: float) -> list[Item]:
        """Return the batch to launch now, most urgent window first; empty if all should wait.

        It passes over all streams with a window in nearly every turn, without a call for most of
        them, and looks up the windows of those that it chooses.
        """
        ready = [
            task
            for task in self._ready
            if task.plays_until_s != NOT_STARTED or task.is_startable(now_s)
        ]
        if not ready:
            return []
        underruns_s = [
            task.underrun_s(now_s) if task.samples_launched else task.plays_until_s
            for task in ready
        ]
        pacer = self._pacer
        if pacer is None:
            limit_s = now_s + COMFORT_S if self._awaiting_first_audio else math.inf
            return self._chosen(ready, underruns_s, now_s, limit_s=limit_s)
        underrun_s = min(underruns_s)
        awaits_first_audio = underrun_s == NOT_STARTED
        if awaits_first_audio:
            started_s = (time_s for time_s in underruns_s if time_s > NOT_STARTED)
            underrun_s = min(started_s, default=math.inf)
        if not pacer.is_due(
            now_s,
            underrun_s=underrun_s,
            awaits_first_audio=awaits_first_audio,
            fills_batch=self._is_full_batch(ready, underruns_s, now_s + pacer.ahead_s),
            has_all_streams=len(self._ready) == len(self._tasks),
            num_in_flight=len(self._launched),
        ):
            return []
        return self._chosen(ready, underruns_s, now_s, urgent_s=now_s + pacer.near_s(1))

    def _is_full_batch(
        self, ready: Sequence[SpeechStream], underruns_s: Sequence[float], limit_s: float
    ) -> bool:
        """Return whether the ready windows of streams that underrun by then fill a batch."""
        found = [task for task, time_s in zip(ready, underruns_s, strict=True) if time_s < limit_s]
        if len(found) >= self._max_batch:
            return True  # each has a window at least
        num_windows = sum(min(task.num_ready, self._most_of_stream) for task in found)
        return num_windows >= self._max_batch

    def _chosen(
        self,
        ready: Sequence[SpeechStream],
        underruns_s: Sequence[float],
        now_s: float,
        *,
        limit_s: float = math.inf,
        urgent_s: float = -math.inf,
    ) -> list[Item]:
        """Return at most `max_batch` windows that are needed before `limit_s`, the most urgent
        first: those that can share a call with that one, and those needed before `urgent_s`.

        A window is as urgent as its stream would be with the windows before it. The streams take
        turns in this way, so that one whose codes are far ahead does not fill the call.
        """
        assert self._decoder is not None
        chosen: list[Item] = []
        keys: set[Hashable] = set()
        # The next window of each stream; the count decides between equal times, by arrival. The
        # windows of a stream are looked up when it is its turn.
        no_windows: tuple[DecodeRequest, ...] = ()
        heads = list(zip(underruns_s, count(), ready, repeat(no_windows), strict=False))
        if limit_s < math.inf:
            heads = [head for head in heads if head[0] < limit_s]
        heapq.heapify(heads)
        while heads and len(chosen) < self._max_batch:
            time_s, order, task, left = heapq.heappop(heads)
            request, *rest = left or task.requests(self._most_of_stream)
            key = self._decoder.batch_key(request.window)
            if keys and key not in keys and time_s >= urgent_s:
                continue  # and none of the stream's later windows: they follow this one
            keys.add(key)
            chosen.append((task, request))
            if rest:
                time_s = max(time_s, now_s) + task.duration_s(request)
                if time_s < limit_s:
                    heapq.heappush(heads, (time_s, order, task, tuple(rest)))
        return chosen

    def _launch(self, batch: Sequence[Item]) -> None:
        """Launch a batch; if the decoder rejects it, end only the streams that it rejects."""
        if not batch or self._renderer is None:
            return
        started_s = self._clock()
        tasks = [task for task, _ in batch]
        for task in tasks:
            task.launch()
        try:
            with self._profiler.range("decode_audio") if self._profiler else nullcontext():
                rendered = self._renderer.launch([request for _, request in batch])
        except Exception as error:  # outermost handler on the engine's thread
            for task in tasks:
                task.withdraw()
            self._isolate(batch, error)
            return
        self._launched.append(InFlightBatch(tasks, rendered, started_s))
        for task in dict.fromkeys(tasks):
            if not task.num_ready:
                self._ready.pop(task, None)

    def _isolate(self, batch: Sequence[Item], error: Exception) -> None:
        tasks = dict.fromkeys(task for task, _ in batch)
        if len(tasks) == 1:
            self._fail(batch[0][0], error)
            return
        for task in tasks:
            self._launch([item for item in batch if item[0] is task])

    def _rendered(self) -> list[InFlightBatch]:
        """Remove and return the rendered batches, oldest first."""
        found = []
        while self._launched and self._launched[0].rendered.is_ready:
            batch = self._launched.popleft()
            if self._pacer is not None:
                self._pacer.note(batch.started_s, batch.rendered.took_s)
            found.append(batch)
        return found

    def _deliver(self, batch: InFlightBatch) -> None:
        try:
            audio = batch.rendered.samples()
        except Exception as error:  # the device failed while rendering
            for task in batch.tasks:
                self._fail(task, error)
            return
        now_s, is_first = self._clock(), any(task.is_unheard for task in batch.tasks)
        for task, samples in zip(batch.tasks, audio, strict=True):
            task.deliver(samples, now_s)
        if is_first and len(self._tasks) < FEW:
            self.wakeups.flush(SENT_S)
        self._decode_s.observe(batch.rendered.took_s)
        self._blocks.observe(len(batch.tasks))
        self._audio_s += sum(map(len, audio)) / self._sample_rate
        for task in dict.fromkeys(batch.tasks):
            self._review(task)

    def _fail(self, task: StreamTask, error: Exception) -> None:
        about = with_fields(("request_id", task.request_id))
        logger.error("a request's audio cannot be made", exc_info=error, extra=about)
        self._engine.cancel(task.request_id)
        task.end(FinishReason.ERROR, f"its audio cannot be made: {error}")
