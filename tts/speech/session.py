"""Synthesis session: text arrives over time, with flushes and barge-in.

feed, flush, cancel, close  ─▶ queue of segments and flush marks ─▶ events: one reader
(any moment, never wait)                                            speaks them in order
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from llm import FinishReason
from tts.errors import IdleTimeoutError, InvalidRequestError
from tts.speech.run import SynthesisRun
from tts.speech.types import (
    Done,
    FlushDone,
    SessionEvent,
    SpokenEvent,
    UtteranceCancelled,
)
from tts.text.segmenter import SegmentStream, TextOptions, TextSegment

MAX_WAITING_FLUSHES = 256
STARVED_S = 0.2  # after so long without text the client has played all audio


@dataclass(frozen=True, slots=True)
class SessionTimes:
    """Timeouts of a session; None: disabled.

    After `max_text_delay_s` an incomplete sentence is spoken; after `idle_s` without text, and
    with no text left to speak, the session ends with an error.
    """

    max_text_delay_s: float | None = None
    idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class _FlushMark:
    flush_id: str


class StreamingSession:
    """Session of one client. The input methods and the reader of `events` share one event loop."""

    def __init__(self, speech: SynthesisRun, options: TextOptions, times: SessionTimes) -> None:
        self._speech = speech
        self._text = SegmentStream(options)
        self._times = times
        self._queue: deque[TextSegment | _FlushMark] = deque()
        self._arrived = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._is_closed = False
        self._was_cancelled = False
        self._has_segment = False
        self._last_activity_s = time.monotonic()  # time of the last input or audio
        self._spoke_s = self._last_activity_s
        self._unspoken_since_s: float | None = None

    def __repr__(self) -> str:
        return f"StreamingSession(queue={len(self._queue)}, {self._text!r})"

    @property
    def num_characters(self) -> int:
        """Number of code points fed so far."""
        return self._text.num_characters

    @property
    def awaits_first_audio(self) -> bool:
        """Whether there is text to speak, and no audio of the session yet."""
        return self._has_segment and not self._speech.num_samples

    def feed(self, text: str) -> None:
        """Append text, which may be cut anywhere within words. Raises `TextError`."""
        self._check_open()
        segments = self._text.feed(text)
        self._has_segment |= bool(segments)
        if segments or self._unspoken_since_s is None:
            self._unspoken_since_s = time.monotonic()
        self._enqueue(segments)

    def flush(self, flush_id: str = "") -> None:
        """Speak the text fed so far at once; `FlushDone` follows its audio."""
        self._check_open()
        if sum(isinstance(item, _FlushMark) for item in self._queue) >= MAX_WAITING_FLUSHES:
            raise InvalidRequestError.of("flush", f"{MAX_WAITING_FLUSHES} flushes are waiting")
        self._enqueue(self._text.flush(), _FlushMark(flush_id))
        self._unspoken_since_s = None

    def cancel(self) -> None:
        """Drop all text and audio that is not sent yet, and waiting flushes.

        `UtteranceCancelled` follows, and the session continues."""
        self._text.discard()
        self._queue.clear()
        self._unspoken_since_s = None
        self._cancelled.set()
        self._enqueue(())

    def close(self) -> None:
        """End the input: the remaining text is spoken, then `Done` follows. Can be called twice."""
        if not self._is_closed:
            self._enqueue(self._text.flush())
            self._is_closed = True

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        """Yield all events. Closing the iterator cancels the session.

        Raises IdleTimeoutError, and SynthesisError when the engine fails.
        """
        yield self._speech.started
        while not self._speech.is_exhausted:
            if self._cancelled.is_set():
                yield self._cancel_utterance()
            elif self._queue:
                async with aclosing(self._handle(self._queue.popleft())) as events:
                    async for event in events:
                        yield event
                self._last_activity_s = self._spoke_s = time.monotonic()
            elif self._is_closed:
                break
            else:
                await self._wait()
        async for chunk in self._speech.finish():
            yield chunk
        if self._was_cancelled and self._speech.finish_reason is FinishReason.STOP:
            self._speech.finish_reason = FinishReason.CANCELLED
        self._speech.warn_of_lost(self._text.num_lost)
        yield Done(self._speech.result(self.num_characters))

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError.of("request", "the session was closed")

    def _enqueue(self, segments: Iterable[TextSegment], mark: _FlushMark | None = None) -> None:
        self._last_activity_s = time.monotonic()
        self._queue.extend(segments)
        if mark is not None:
            self._queue.append(mark)
        self._arrived.set()

    def _cancel_utterance(self) -> UtteranceCancelled:
        self._cancelled.clear()
        self._speech.drop()
        self._was_cancelled = True
        return UtteranceCancelled(self._speech.num_samples)

    async def _handle(self, item: TextSegment | _FlushMark) -> AsyncGenerator[SessionEvent, None]:
        if isinstance(item, TextSegment):
            self._was_cancelled = False
            if time.monotonic() - self._spoke_s > STARVED_S:
                self._speech.restart()
            async with aclosing(self._speak(item)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        async for chunk in self._speech.flush():
            yield chunk
        self._speech.restart()
        yield FlushDone(item.flush_id, self._speech.num_samples)

    async def _speak(self, segment: TextSegment) -> AsyncGenerator[SpokenEvent, None]:
        """Yield a segment's audio, until it ends or is cancelled.

        A chunk that is ready at the cancellation is still sent: its bytes are part of the
        container's stream.
        """
        stop = asyncio.ensure_future(self._cancelled.wait())
        try:
            async with aclosing(self._speech.speak(segment)) as chunks:
                while not stop.done():
                    chunk = await _next_before(chunks, stop)
                    if chunk is None:
                        return
                    yield chunk
        finally:
            stop.cancel()

    async def _wait(self) -> None:
        """Wait until input arrives or a timeout expires."""
        self._arrived.clear()
        timeout = min(self._seconds_left().values(), default=None)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)
        left = self._seconds_left()
        if left.get("text", 1.0) <= 0:
            self._unspoken_since_s = None
            self._queue.extend(self._text.flush())
        elif left.get("idle", 1.0) <= 0:
            raise IdleTimeoutError(f"no text arrived for {self._times.idle_s:g} s")

    def _seconds_left(self) -> dict[str, float]:
        """Return the seconds until waiting text is spoken, and until the session is idle."""
        now_s, times, left = time.monotonic(), self._times, {}
        if times.max_text_delay_s is not None and self._unspoken_since_s is not None:
            left["text"] = self._unspoken_since_s + times.max_text_delay_s - now_s
        if times.idle_s is not None:
            left["idle"] = self._last_activity_s + times.idle_s - now_s
        return left


async def _next_before(
    chunks: AsyncIterator[SpokenEvent], stop: asyncio.Future[Any]
) -> SpokenEvent | None:
    """Return the next chunk; None at the end, or if `stop` is set first."""
    step = asyncio.ensure_future(anext(chunks, None))
    try:
        await asyncio.wait((step, stop), return_when=asyncio.FIRST_COMPLETED)
        return step.result() if step.done() else None
    finally:
        if not step.done():
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
