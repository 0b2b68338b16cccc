"""`LocalEngineClient`: the engine, the audio decoder and their streams in one process.

event loop                                   engine thread
speak ── submit ──────────────────────────▶ Engine.step ─▶ sink: SpeechTask.on_tokens
  ▲                                           AudioWorker.after_step: render, deliver
  └── await queue.get() ◀── StreamQueue ◀──────┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from decoder import AudioDecoder, CodecSpec
from llm import EngineStoppedError, Request, TokenChunk
from tts.audio_worker import AudioWorker, Ranges
from tts.engine_client import AudioBlock, EngineStatus, SpeechJob
from tts.errors import Precondition, PreconditionError
from tts.stream import StreamHooks, StreamQueue
from tts.tasks import CodeMap, SpeechSetup, SpeechTask, StreamTask, TextTask

if TYPE_CHECKING:
    import numpy as np

    from llm import Engine, EngineStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How far a stream may run ahead of its reader, and how much is done at once.

    A stream holds at most `audio_blocks` rendered blocks plus about `codes_ahead` codes (or
    `text_chunks` chunks of text), then it is paused. `reader_timeout_s` ends a stream whose
    reader leaves an item unread for so long (None: never). An engine whose step has not returned
    for `step_timeout_s` is not alive (None: it may take any time).
    """

    audio_blocks: int = 8
    codes_ahead: int = 100
    text_chunks: int = 64
    reader_timeout_s: float | None = None
    step_timeout_s: float | None = None
    encoders: int = 1


class LocalEngineClient:
    """`EngineClient` over an engine of this process. Starts the engine; `close` stops it.

    `decoder` and `code_map` are None for a model that only writes text.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: AudioDecoder | None = None,
        code_map: CodeMap | None = None,
        limits: StreamLimits | None = None,
        *,
        profiler: Ranges | None = None,
        linear_layers: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self._limits = limits or StreamLimits()
        self._engine = engine
        self._decoder = decoder
        self._setup = None
        if decoder is not None and code_map is not None:
            self._setup = SpeechSetup(decoder.spec, code_map, self._limits.codes_ahead)
        self._worker = AudioWorker(engine, decoder, profiler)
        self._encoders = ThreadPoolExecutor(self._limits.encoders, thread_name_prefix="encode")
        self._linear_layers = linear_layers
        self._is_closing = self._hangs = False
        engine.set_hook(self._worker)
        engine.start()

    def __repr__(self) -> str:
        return f"LocalEngineClient({self._worker!r})"

    @property
    def codec(self) -> CodecSpec | None:
        """The audio decoder's facts; None for a text-only model."""
        return self._setup.spec if self._setup else None

    async def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Stream a text request. Closing the iterator cancels it.

        Raises what `Engine.submit` raises, and SlowReaderError.
        """
        task = TextTask(request.request_id, self._queue(self._limits.text_chunks))
        self._submit(task, request)
        try:
            chunk = None
            while chunk is None or chunk.finish_reason is None:
                chunk = await task.queue.get()
                yield chunk
        finally:
            self._leave(task)

    async def speak(self, job: SpeechJob) -> AsyncIterator[AudioBlock]:
        """Stream a speech job. Closing the iterator cancels it.

        Raises what `Engine.submit` raises, SlowReaderError, CodeRangeError for codes outside the
        codebook, and PreconditionError for a text-only model.
        """
        if self._setup is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        task = SpeechTask(job, self._setup, self._queue(self._limits.audio_blocks))
        self._submit(task, job.request)
        try:
            block = None
            while block is None or block.finish_reason is None:
                block = await task.queue.get()
                yield block
        finally:
            self._leave(task)

    async def encode_prompt(self, samples: np.ndarray) -> tuple[int, ...]:
        """Codes of a reference clip: mono float32 at the codec's rate. Few run at once.

        Raises PreconditionError when the codec has no encoder.
        """
        decoder = self._decoder
        if decoder is None or not decoder.spec.can_encode:
            raise PreconditionError(
                Precondition.VOICE_CLONING, "this model cannot take a voice from a recording"
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoders, decoder.encode, samples)

    async def status(self) -> EngineStatus:
        """A snapshot."""
        stats = self._engine.stats()
        return EngineStatus(
            running=stats.running + stats.paused,
            waiting=stats.waiting,
            used_pages=stats.used_pages,
            total_pages=stats.total_pages,
            audio_streams=self._worker.num_audio_streams,
            preemptions=stats.preemptions,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            is_alive=self._engine.is_running and not self._note_hang(stats),
            stats=stats,
            audio=self._worker.figures(),
            linear_layers=self._linear_layers,
        )

    def _note_hang(self, stats: EngineStats) -> bool:
        """Whether a step takes too long; logged when it begins to."""
        limit_s, taken_s = self._limits.step_timeout_s, max(stats.turn_s, self._worker.rendering_s)
        hung, self._hangs = self._hangs, limit_s is not None and taken_s > limit_s
        if self._hangs and not hung:
            text = "a step has not returned for %.1f s (step_timeout_s=%g): the engine hangs"
            logger.error(text, taken_s, limit_s)
        return self._hangs

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, finish what runs within `drain_s`, cancel the rest, stop.

        Readers get what was generated for them, also after this returned. An engine that hangs is
        left behind.
        """
        self._is_closing = True
        await asyncio.to_thread(self._stop, drain_s)

    def _stop(self, drain_s: float) -> None:
        deadline_s = time.monotonic() + drain_s
        if drain_s > 0:
            self._engine.drain(drain_s)
            self._worker.wait_idle(max(0.0, deadline_s - time.monotonic()))
        if not self._note_hang(self._engine.stats()):
            self._engine.shutdown()
        self._encoders.shutdown(wait=True, cancel_futures=True)

    def _queue(self, capacity: int) -> StreamQueue[Any]:
        return StreamQueue(
            capacity, timeout_s=self._limits.reader_timeout_s, wakeups=self._worker.wakeups
        )

    def _submit(self, task: StreamTask, request: Request) -> None:
        if self._is_closing:
            raise EngineStoppedError("the engine is shutting down")
        hooks = StreamHooks(
            on_room=partial(self._worker.look_at, task),
            on_stall=partial(self._worker.abandon, task),
        )
        task.queue.connect(hooks)
        self._worker.add(task)
        try:
            self._engine.submit(request, partial(self._worker.take, task))
        except BaseException:
            self._worker.remove(task)
            raise

    def _leave(self, task: StreamTask) -> None:
        """The reader is done with a stream, whether it has ended or not."""
        task.queue.close()
        self._worker.abandon(task)
