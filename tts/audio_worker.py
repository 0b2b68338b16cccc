"""Turns speech codes into audio between the language model's steps, on the engine's thread.

    engine thread:  step │ turn │ step │ turn │ step …
                           └─ review    streams that told of something: forget those that are done,
                              │         pause those whose reader lags, resume the others
                              launch    at most one batch: the most urgent windows
                              deliver   what the decoder has rendered
                              wake      the readers of all that was delivered, together

A GPU renders beside the language model's steps, and nothing here waits for it: `Pace` says when a
batch is due, so that many windows share a call. A CPU has rendered a batch when it is launched. One
batch per turn keeps every other stream's next token at most one decoder call away. Urgent is whose
listener hears silence first: streams without audio yet in order of arrival, then by the estimated
end of what the client has to play. A turn looks at streams in which something has changed, and at
those with a window to render, however many there are besides.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol

from decoder import AudioDecoder, DecodeWindow, ReadyWindow, Rendered, Renderer
from llm import FinishReason, RequestError, Tally, TokenChunk
from tts.engine_client import AudioFigures
from tts.logs import with_fields
from tts.pace import Pace, Waiting
from tts.stream import Wakeups
from tts.tasks import NOT_STARTED, SpeechTask, StreamTask

logger = logging.getLogger(__name__)

DECODE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BLOCK_BOUNDS = (1, 2, 4, 8, 16, 32)
MAX_LAUNCHED = 2  # batches: one that runs, one that is next
POLL_S = 0.0002  # between two looks at a device that renders, when nothing else is to be done
COMFORT_S = 0.5
"""On a CPU: a listener with this much audio ahead can wait while another one has heard nothing."""


class EngineControl(Protocol):
    """The part of the engine that a worker steers; callable from any thread."""

    def cancel(self, request_id: str) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    def wake(self) -> None: ...


class Ranges(Protocol):
    """Names a phase for a profiler; `llm.Profiler` is one."""

    def range(self, name: str) -> AbstractContextManager[object]: ...


class Rendering(NamedTuple):
    """One window of one task, on its way through the decoder."""

    task: SpeechTask
    window: DecodeWindow

    @property
    def ready(self) -> ReadyWindow:
        """As the decoder takes it."""
        task = self.task
        return ReadyWindow(self.window, task.state, as_s16=task.as_s16)


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """Windows that the decoder is at."""

    items: Sequence[Rendering]
    rendered: Rendered
    started_s: float  # of the worker's clock


class AudioWorker:
    """The engine's step hook: all streams of one engine, speech and text.

    A turn belongs to the engine's thread; streams come and go from any. `pace` None launches
    whenever there is something; by default that is so where the decoder runs on a CPU.
    """

    def __init__(
        self,
        engine: EngineControl,
        decoder: AudioDecoder | None,
        profiler: Ranges | None = None,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._profiler = profiler
        self._clock = clock
        self._decoder = decoder
        self._renderer = Renderer(decoder) if decoder else None
        is_beside = decoder is not None and decoder.device != "cpu"
        self._pace = Pace() if pace is None and is_beside else pace
        self.poll_s = POLL_S if is_beside else 0.0
        self._max_batch = decoder.options.max_batch if decoder else 0
        self._launched: deque[LaunchedBatch] = deque()
        self._tasks: dict[str, StreamTask] = {}
        self._news: deque[StreamTask] = deque()  # appended to in any thread
        self._ready: dict[SpeechTask, None] = {}  # those with a window to launch
        self._unheard: set[SpeechTask] = set()  # those that await their first audio
        self._changed = threading.Condition()
        self.wakeups = Wakeups()
        """Of the event loops that read: flushed by each turn."""
        self._decode_s, self._blocks = Tally(DECODE_BOUNDS_S), Tally(BLOCK_BOUNDS)
        self._audio_s = 0.0
        self._sample_rate = decoder.spec.sample_rate if decoder else 1

    def __repr__(self) -> str:
        return f"AudioWorker({self._snapshot()})"

    @property
    def num_audio_streams(self) -> int:
        """Decoder states alive."""
        return sum(isinstance(task, SpeechTask) for task in self._snapshot())

    @property
    def rendering_s(self) -> float:
        """How long the decoder has been at its oldest batch, 0 without one; from any thread."""
        with suppress(IndexError):
            return self._clock() - self._launched[0].started_s
        return 0.0

    def figures(self) -> AudioFigures:
        """What was rendered since the start, and what waits for its reader; from any thread."""
        return AudioFigures(
            self._decode_s.snapshot(),
            self._blocks.snapshot(),
            self._audio_s,
            sum(len(task.queue) for task in self._snapshot()),
        )

    def add(self, task: StreamTask) -> None:
        """Serve a stream from now on; before its request is submitted."""
        with self._changed:
            former = self._tasks.get(task.request_id)
            if former is not None and not former.is_done:
                raise RequestError(f"request_id '{task.request_id}' is in use")
            self._tasks[task.request_id] = task
        task.connect(self._news.append)

    def remove(self, task: StreamTask) -> None:
        """Forget a stream."""
        with self._changed:
            if self._tasks.get(task.request_id) is task:
                del self._tasks[task.request_id]
            self._changed.notify_all()

    def abandon(self, task: StreamTask) -> None:
        """Stop a stream whose reader has gone, and free what it holds; from any thread."""
        task.is_abandoned = True
        with self._changed:
            is_served = self._tasks.get(task.request_id) is task
        if is_served:
            self._engine.cancel(task.request_id)
            self.look_at(task)

    def look_at(self, task: StreamTask) -> None:
        """Have a turn look at a stream soon; from any thread."""
        self._news.append(task)
        self._engine.wake()

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until no stream is left, from any thread but the engine's; False: too late."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks, timeout_s)

    def take(self, task: StreamTask, chunk: TokenChunk) -> None:
        """The sink of a stream's request, on the engine's thread."""
        try:
            task.on_tokens(chunk)
        except Exception as error:  # the engine would only log it, and the reader wait for ever
            self._fail(task, error)

    def after_step(self) -> bool:
        """One turn; True when there may be more to do."""
        try:
            return self._turn()
        finally:
            self.wakeups.flush()

    def _turn(self) -> bool:
        for task in self._changed_tasks():
            self._review(task)
        rendered = self._rendered()
        if self._ready and len(self._launched) < MAX_LAUNCHED:
            self.wakeups.flush()  # a CPU renders now, and texts need not wait for that
            self._launch(self._due(self._clock()))
        for batch in (*rendered, *self._rendered()):
            self._deliver(batch)
        return bool(self._ready or self._launched or self._news)

    def on_stop(self) -> None:
        """End what is left: the engine stops."""
        try:
            for task in self._snapshot():
                task.end(FinishReason.CANCELLED)
                self.remove(task)
        finally:
            self.wakeups.flush()

    def _snapshot(self) -> list[StreamTask]:
        with self._changed:
            return list(self._tasks.values())

    def _changed_tasks(self) -> dict[StreamTask, None]:
        """What was told since the last turn, each stream once."""
        news = self._news
        return dict.fromkeys(news.popleft() for _ in range(len(news)))

    def _review(self, task: StreamTask) -> None:
        """After a change: is it over, has it a window to render, should it be paused?"""
        if isinstance(task, SpeechTask):
            task.deliver_end()
            is_over = task.is_done or task.is_abandoned
            _keep(self._ready, task, not is_over and task.num_ready > 0)
            if not is_over and task.awaits_first_audio:
                self._unheard.add(task)
            else:
                self._unheard.discard(task)
        if task.is_done or task.is_abandoned:
            self.remove(task)
        elif task.is_ahead and task.is_generating and not task.is_paused:
            task.is_paused = True
            self._engine.pause(task.request_id)
        elif task.is_paused and not task.is_ahead:
            task.is_paused = False
            self._engine.resume(task.request_id)

    def _due(self, now_s: float) -> list[Rendering]:
        """The batch to launch now, the most urgent first; none when all windows should wait."""
        dry = [task.runs_dry_s(now_s) for task in self._ready]
        if self._pace is not None:
            waiting = Waiting(
                dry_s=min((dry_s for dry_s in dry if dry_s > NOT_STARTED), default=math.inf),
                has_unheard=NOT_STARTED in dry,
                fills_batch=self._fills_batch(),
                is_everyone=len(self._ready) == len(self._tasks),
            )
            if not self._pace.is_due(now_s, waiting, is_busy=bool(self._launched)):
                return []
        by_urgency = sorted(zip(dry, self._ready, strict=True), key=itemgetter(0))
        is_pressed = self._pace is None and self._unheard
        limit_s = now_s + COMFORT_S if is_pressed else math.inf
        return self._together([task for dry_s, task in by_urgency if dry_s < limit_s])

    def _fills_batch(self) -> bool:
        """Whether a batch is full of what is ready."""
        num_missing = self._max_batch
        for task in self._ready:
            num_missing -= task.num_ready
            if num_missing <= 0:
                return True
        return False

    def _together(self, tasks: Sequence[SpeechTask]) -> list[Rendering]:
        """Windows that share a call with the first one, at most `max_batch`."""
        assert self._decoder is not None
        chosen: list[Rendering] = []
        key: Hashable = None
        for task in tasks:
            for window in task.windows():
                own_key = self._decoder.batch_key(window)
                if chosen and own_key != key:
                    break
                key = own_key
                chosen.append(Rendering(task, window))
            if len(chosen) >= self._max_batch:
                break
        return chosen[: self._max_batch]

    def _launch(self, batch: Sequence[Rendering]) -> None:
        """Start a batch; when the decoder refuses it, only the streams that are refused end."""
        if not batch or self._renderer is None:
            return
        started_s = self._clock()
        for item in batch:
            item.task.launched()
        try:
            with self._profiler.range("decode_audio") if self._profiler else nullcontext():
                rendered = self._renderer.launch([item.ready for item in batch])
        except Exception as error:  # the engine thread's top: whatever a codec raises
            for item in batch:
                item.task.withdrawn()
            self._isolate(batch, error)
            return
        self._launched.append(LaunchedBatch(batch, rendered, started_s))
        for task in {item.task: None for item in batch}:
            _keep(self._ready, task, task.num_ready > 0)

    def _isolate(self, batch: Sequence[Rendering], error: Exception) -> None:
        tasks = {item.task.request_id: item.task for item in batch}
        if len(tasks) == 1:
            self._fail(batch[0].task, error)
            return
        for task in tasks.values():
            self._launch([item for item in batch if item.task is task])

    def _rendered(self) -> list[LaunchedBatch]:
        """Batches that are ready, oldest first; they are no longer among the launched."""
        found = []
        while self._launched and self._launched[0].rendered.is_ready:
            batch = self._launched.popleft()
            if self._pace is not None:
                self._pace.note(batch.started_s, batch.rendered.took_s)
            found.append(batch)
        return found

    def _deliver(self, batch: LaunchedBatch) -> None:
        try:
            audio = batch.rendered.samples()
        except Exception as error:  # the device broke while it rendered
            for item in batch.items:
                self._fail(item.task, error)
            return
        self._decode_s.observe(batch.rendered.took_s)
        self._blocks.observe(len(batch.items))
        self._audio_s += sum(map(len, audio)) / self._sample_rate
        now_s = self._clock()
        for item, samples in zip(batch.items, audio, strict=True):
            item.task.deliver(samples, now_s)
        for task in {item.task: None for item in batch.items}:
            self._review(task)

    def _fail(self, task: StreamTask, error: Exception) -> None:
        about = with_fields(("request_id", task.request_id))
        logger.error("a request's audio cannot be made", exc_info=error, extra=about)
        self._engine.cancel(task.request_id)
        task.end(FinishReason.ERROR, f"its audio cannot be made: {error}")


def _keep(tasks: dict[SpeechTask, None], task: SpeechTask, is_in: bool) -> None:
    if is_in:
        tasks[task] = None
    else:
        tasks.pop(task, None)
