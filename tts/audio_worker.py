"""Turns speech codes into audio between the language model's steps, on the engine's thread.

    engine thread:  step │ turn │ step │ turn │ step …
                           └─ sweep     forget streams whose reader has gone or that are done
                              collect   batches that the decoder has rendered
                              launch    at most one batch: the most urgent window and its like
                              regulate  pause sequences whose reader lags, resume the others

A GPU renders beside the language model's steps, and nothing here waits for it; a CPU has rendered a
batch when it is launched. One batch per turn keeps every other stream's next token at most one
decoder call away. Urgent is
whose listener hears silence first: streams without audio yet in order of arrival, then by the
estimated end of what the client has to play.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import numpy as np

from decoder import AudioDecoder, DecodeWindow, ReadyWindow, Rendered, Renderer
from llm import FinishReason, RequestError, Tally, TokenChunk
from tts.engine_client import AudioFigures
from tts.logs import with_fields
from tts.tasks import SpeechTask, StreamTask

logger = logging.getLogger(__name__)

DECODE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
BLOCK_BOUNDS = (1, 2, 4, 8, 16, 32)
MAX_LAUNCHED = 2  # batches: one that runs, one that is next
COMFORT_S = 0.5
"""A listener with this much audio ahead can wait while another one has heard nothing yet."""


class EngineControl(Protocol):
    """The part of the engine that a worker steers; callable from any thread."""

    def cancel(self, request_id: str) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...

    def wake(self) -> None: ...


class Ranges(Protocol):
    """Names a phase for a profiler; `llm.Profiler` is one."""

    def range(self, name: str) -> AbstractContextManager[object]: ...


@dataclass(frozen=True, slots=True)
class Rendering:
    """One window of one task, on its way through the decoder."""

    task: SpeechTask
    window: DecodeWindow

    @property
    def ready(self) -> ReadyWindow:
        """As the decoder takes it."""
        return ReadyWindow(self.task.request_id, self.window, self.task.state)


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """Windows that the decoder is at."""

    items: Sequence[Rendering]
    rendered: Rendered
    started_s: float


class AudioWorker:
    """The engine's step hook: all streams of one engine, speech and text.

    A turn belongs to the engine's thread; streams come and go from any.
    """

    def __init__(
        self,
        engine: EngineControl,
        decoder: AudioDecoder | None,
        profiler: Ranges | None = None,
    ) -> None:
        self._engine = engine
        self._profiler = profiler
        self._renderer = Renderer(decoder) if decoder else None
        self._max_batch = decoder.options.max_batch if decoder else 0
        self._launched: deque[LaunchedBatch] = deque()
        self._tasks: dict[str, StreamTask] = {}
        self._changed = threading.Condition()
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
            return time.perf_counter() - self._launched[0].started_s
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
        """One turn; True when there may be more to do at once."""
        speech = [task for task in self._sweep() if isinstance(task, SpeechTask)]
        ready = [task for task in speech if task.windows()]
        if len(self._launched) < MAX_LAUNCHED:
            self._launch(self._most_urgent(ready, speech, time.monotonic()))
        self._collect()
        for task in speech:
            task.deliver_end()
        self._regulate(self._sweep())
        return bool(ready or self._launched)

    def on_stop(self) -> None:
        """End what is left: the engine stops."""
        for task in self._snapshot():
            task.end(FinishReason.CANCELLED)
            self.remove(task)

    def _snapshot(self) -> list[StreamTask]:
        with self._changed:
            return list(self._tasks.values())

    def _sweep(self) -> list[StreamTask]:
        """The streams that are still to be served."""
        alive = []
        for task in self._snapshot():
            if task.is_done or task.is_abandoned:
                self.remove(task)
            else:
                alive.append(task)
        return alive

    def _most_urgent(
        self, ready: Sequence[SpeechTask], speech: Sequence[SpeechTask], now_s: float
    ) -> list[Rendering]:
        """Windows of one shape, the most urgent first; none when all of them should wait."""
        limit_s = now_s + COMFORT_S if any(t.awaits_first_audio for t in speech) else math.inf
        chosen: list[Rendering] = []
        dry = [(task.runs_dry_s(now_s), task) for task in ready]
        for runs_dry_s, task in sorted(dry, key=itemgetter(0)):
            if runs_dry_s >= limit_s:
                break
            windows = task.windows()
            if not chosen or windows[0].shape == chosen[0].window.shape:
                chosen += [Rendering(task, window) for window in windows]
        return chosen[: self._max_batch]

    def _launch(self, batch: Sequence[Rendering]) -> None:
        """Start a batch; when the decoder refuses it, only the streams that are refused end."""
        if not batch or self._renderer is None:
            return
        started_s = time.perf_counter()
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

    def _isolate(self, batch: Sequence[Rendering], error: Exception) -> None:
        tasks = {item.task.request_id: item.task for item in batch}
        if len(tasks) == 1:
            self._fail(batch[0].task, error)
            return
        for task in tasks.values():
            self._launch([item for item in batch if item.task is task])

    def _collect(self) -> None:
        """Deliver what has been rendered, oldest first."""
        while self._launched and self._launched[0].rendered.is_ready:
            batch = self._launched.popleft()
            try:
                audio = batch.rendered.samples()
            except Exception as error:  # the device broke while it rendered
                for item in batch.items:
                    self._fail(item.task, error)
                continue
            self._decode_s.observe(time.perf_counter() - batch.started_s)
            self._blocks.observe(len(batch.items))
            self._audio_s += sum(map(len, audio)) / self._sample_rate
            self._deliver(batch.items, audio)

    def _fail(self, task: StreamTask, error: Exception) -> None:
        about = with_fields(("request_id", task.request_id))
        logger.error("a request's audio cannot be made", exc_info=error, extra=about)
        self._engine.cancel(task.request_id)
        task.end(FinishReason.ERROR, f"its audio cannot be made: {error}")

    def _deliver(self, batch: Sequence[Rendering], audio: Sequence[np.ndarray]) -> None:
        now_s = time.monotonic()
        for item, samples in zip(batch, audio, strict=True):
            item.task.deliver(samples, now_s)

    def _regulate(self, tasks: Sequence[StreamTask]) -> None:
        for task in tasks:
            if task.is_ahead and task.is_generating and not task.is_paused:
                task.is_paused = True
                self._engine.pause(task.request_id)
            elif task.is_paused and not task.is_ahead:
                task.is_paused = False
                self._engine.resume(task.request_id)
