"""`LocalEngineClient`: the engine, the audio decoder and their streams in one process.

event loop                                   engine thread
speak ── submit ──────────────────────────▶ Engine.step ─▶ sink: SpeechStream.on_tokens
  ▲                                           DecodeLoop.after_step: render, deliver
  └── await queue.get() ◀── StreamQueue ◀──────┘
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from decoder import AudioDecoder, CodecSpec, SpeakerEncoder, StreamingOptions
from llm import EngineStoppedError, ReceivedPrompt, Request, TokenChunk
from tts.engine.client import AudioBlock, EncodedClip, Hold, SpeechJob
from tts.engine.decode_loop import DecodeLoop, RangeProfiler
from tts.engine.pacer import DeadlinePacer
from tts.engine.queue import StreamQueue
from tts.engine.streams import CodeMap, SpeechSetup, SpeechStream, StreamTask, TextStream
from tts.errors import Precondition, PreconditionError
from tts.observe.engine_status import EngineStatus

if TYPE_CHECKING:
    import numpy as np

    from llm import Engine, EngineStats

logger = logging.getLogger(__name__)

SHUTDOWN_S = 0.2  # between two looks whether the step hangs for which a shutdown waits


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds on buffered items of a stream, concurrency limits, and timeouts.

    A stream buffers at most `audio_blocks` rendered blocks plus about `codes_ahead` tokens of
    speech (or `text_chunks` chunks of text), then it is paused. `reader_timeout_s` ends a stream
    whose reader leaves an item unread for so long (None: never). An engine whose step does not
    return for `step_timeout_s` counts as not alive (None: no limit). Streams may share a GPU
    `by_deadline` of their listeners (`DeadlinePacer`).
    """

    audio_blocks: int = 8
    codes_ahead: int = 100
    text_chunks: int = 64
    reader_timeout_s: float | None = None
    step_timeout_s: float | None = None
    encoders: int = 1
    by_deadline: bool = False


class LocalEngineClient:
    """`EngineClient` of an engine in this process. Starts the engine; `close` stops it.

    `decoder` and `code_map` are None for a text-only model; `streaming` as in `DecodeLoop`.
    """

    def __init__(
        self,
        engine: Engine,
        decoder: AudioDecoder | None = None,
        code_map: CodeMap | None = None,
        limits: StreamLimits | None = None,
        *,
        streaming: StreamingOptions | None = None,
        profiler: RangeProfiler | None = None,
        linear_layers: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self._limits = limits or StreamLimits()
        self._engine = engine
        self._decoder = decoder
        self.speakers: SpeakerEncoder | None = None
        """Encoder of the speakers of clips, for a model that reads their vectors."""
        self._setup = None
        self.codec: CodecSpec | None = None
        """Specification of the codec; None for a text-only model."""
        if decoder is not None and code_map is not None:
            codes_ahead = self._limits.codes_ahead * code_map.codes_per_token
            self._setup = SpeechSetup(decoder.spec, code_map, codes_ahead)
            self.codec = decoder.spec
        is_paced = self._limits.by_deadline and decoder is not None and decoder.device != "cpu"
        pacer = DeadlinePacer() if is_paced else None
        self._decode_loop = DecodeLoop(engine, decoder, profiler, streaming=streaming, pacer=pacer)
        timeout_s, wakeups = self._limits.reader_timeout_s, self._decode_loop.wakeups
        self._create_queue = partial(StreamQueue[Any], timeout_s=timeout_s, wakeups=wakeups)
        self._encoders = ThreadPoolExecutor(self._limits.encoders, thread_name_prefix="encode")
        self._linear_layers = linear_layers
        self._is_closing = self._hangs = False
        self._held: set[TextStream] = set()
        engine.set_hook(self._decode_loop)
        engine.start()

    def __repr__(self) -> str:
        return f"LocalEngineClient({self._decode_loop!r})"

    @property
    def engine(self) -> Engine:
        """The engine, which this client has started."""
        return self._engine

    async def generate(
        self,
        request: Request,
        hold: Hold | None = None,
        arrival_s: float | None = None,
        received: ReceivedPrompt | None = None,
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request. Closing the iterator cancels it. `arrival_s`, `received`: see
        `Engine.submit`; a token that was received is streamed like the others.

        Raises the errors of `Engine.submit`, and SlowReaderError.
        """
        task = TextStream(request.request_id, self._create_queue(self._limits.text_chunks))
        self._submit(task, request, arrival_s, received)
        if hold is not None:
            hold.on_change = partial(self._set_held, task, hold)
        try:
            chunk = None
            while chunk is None or chunk.finish_reason is None:
                chunk = await task.queue.get()
                yield chunk
        finally:
            self._leave(task)

    async def speak(
        self,
        job: SpeechJob,
        arrival_s: float | None = None,
        received: ReceivedPrompt | None = None,
    ) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job. Closing the iterator cancels it. `arrival_s`, `received`: see
        `generate`.

        Raises the errors of `Engine.submit`, SlowReaderError, CodeRangeError for codes outside
        the codebook, and PreconditionError for a text-only model.
        """
        if self._setup is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        task = SpeechStream(job, self._setup, self._create_queue(self._limits.audio_blocks))
        self._submit(task, job.request, arrival_s, received)
        try:
            block = None
            while block is None or block.finish_reason is None:
                block = await task.queue.get()
                yield block
        finally:
            self._leave(task)

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip: float32 [S], mono at the codec's rate.

        Concurrent encodings are limited. Raises PreconditionError when the codec has no encoder.
        """
        decoder = self._decoder
        if decoder is None or not decoder.spec.can_encode:
            raise PreconditionError(
                Precondition.VOICE_CLONING, "this model cannot take a voice from a recording"
            )
        speakers = self.speakers

        def encoded() -> EncodedClip:
            vector = speakers.encode(samples) if speakers else b""
            return EncodedClip(decoder.encode(samples), vector)

        return await asyncio.get_running_loop().run_in_executor(self._encoders, encoded)

    async def status(self) -> EngineStatus:
        """Return a snapshot."""
        stats = self._engine.stats()
        return EngineStatus(
            running=stats.running + stats.paused,
            waiting=stats.waiting,
            used_pages=stats.used_pages,
            total_pages=stats.total_pages,
            audio_streams=self._decode_loop.num_audio_streams,
            preemptions=stats.preemptions,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            is_alive=self._engine.is_running and not self._check_hang(stats),
            stats=stats,
            audio=self._decode_loop.stats(),
            linear_layers=self._linear_layers,
        )

    def _check_hang(self, stats: EngineStats) -> bool:
        """Return whether a step exceeds its timeout; log it once."""
        limit_s, taken_s = (
            self._limits.step_timeout_s,
            max(stats.turn_s, self._decode_loop.rendering_s),
        )
        hung, self._hangs = self._hangs, limit_s is not None and taken_s > limit_s
        if self._hangs and not hung:
            text = "a step has not returned for %.1f s (step_timeout_s=%g): the engine hangs"
            logger.error(text, taken_s, limit_s)
        return self._hangs

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait up to `drain_s` for running ones, cancel the rest, and stop.

        Readers can read their queued items even after this has returned. The thread of an engine
        that hangs is abandoned.
        """
        self._is_closing = True  # before a thread of the pool is free
        await asyncio.to_thread(self.stop, drain_s)

    def stop(self, drain_s: float = 0.0) -> None:
        """Close the client as `close` does, but block. Callable from any thread."""
        self._is_closing = True
        deadline_s = time.monotonic() + drain_s
        if drain_s > 0:
            self._engine.drain(drain_s)
            self._decode_loop.wait_idle(max(0.0, deadline_s - time.monotonic()))
        while not self._check_hang(self._engine.stats()):
            if self._engine.shutdown(SHUTDOWN_S):
                break
        self._encoders.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self,
        task: StreamTask,
        request: Request,
        arrival_s: float | None,
        received: ReceivedPrompt | None,
    ) -> None:
        if self._is_closing:
            raise EngineStoppedError("the engine is shutting down")
        has_token = received is not None and received.token is not None
        if received is not None and has_token:
            # At once, and while the engine's thread does not know the stream.
            task.on_tokens(_first_chunk(request, received, arrival_s))
        task.queue.on_room = partial(self._decode_loop.mark_dirty, task)
        task.queue.on_stall = partial(self._decode_loop.cancel, task)
        self._decode_loop.add(task)
        if self._held:
            self._hold_step()
        try:
            sink = partial(self._decode_loop.on_tokens, task)
            self._engine.submit(request, sink, arrival_s, received=received, buffer=task.buffer)
        except BaseException:
            self._decode_loop.remove(task)
            raise
        if has_token:
            self._decode_loop.mark_dirty(task)
        self._decode_loop.let_start()

    def _set_held(self, task: TextStream, hold: Hold) -> None:
        task.is_held = hold.is_set
        (self._held.add if hold.is_set else self._held.discard)(task)
        self._decode_loop.mark_dirty(task)
        self._hold_step()

    def _hold_step(self) -> None:
        """Hold the step that is running where the engine has nothing but held texts."""
        self._engine.hold(is_held=self._decode_loop.has_only(self._held))

    def _leave(self, task: StreamTask) -> None:
        """Close a stream that has no reader any more, whether or not it has ended."""
        task.queue.close()
        self._decode_loop.cancel(task)
        if task in self._held:
            self._held.discard(task)
            self._hold_step()


def _first_chunk(request: Request, received: ReceivedPrompt, arrival_s: float | None) -> TokenChunk:
    """Return the chunk of a token that another engine has sampled."""
    waited_s = 0.0 if arrival_s is None else time.monotonic() - arrival_s
    token = received.token
    return TokenChunk(
        request.request_id,
        () if token is None else (token,),
        prompt_tokens=len(request.prompt_ids),
        cached_prompt_tokens=received.num_tokens,
        output_tokens=1,
        queue_s=waited_s,
        prefill_s=0.0,
        total_s=waited_s,
    )
