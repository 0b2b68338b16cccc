"""One client's connection: reads events, speaks one request after the other, and ends both ways.

    reader ── describe, ping ──▶ answered at once
           ── synthesize, synthesize-start ──▶ queue ──▶ speaker: audio-start, audio-chunk…
           ── synthesize-chunk, -stop ──▶ the text of its stream    audio-stop

The reader never waits for the speaker, so the end of the connection cancels a running request and
those in the queue at once. An error ends the connection, because Home Assistant waits for audio
after an `error` event, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, field

from tts.errors import InvalidRequestError, StreamLimitError, TTSError
from tts.server.access import RETRY_S, AccessControl
from tts.server.call import Call, CallError, note_event
from tts.server.context import ServerContext
from tts.speech.types import SessionEvent, SpeechEvent
from tts.v1 import speech_pb2 as pb
from tts.wyoming import wire
from tts.wyoming.frames import BLOCK_BYTES, Event, EventReader

SERVICE = "wyoming"
MAX_REQUESTS = 16  # of one connection: one runs, the others wait
LAST_WORDS_S = 1.0  # time to deliver an error before the connection is closed
USED = frozenset(
    {
        "describe",
        "ping",
        "synthesize",
        "synthesize-start",
        "synthesize-chunk",
        "synthesize-stop",
    }
)
"""Types of events that are read; others are skipped, as the protocol asks."""


@dataclass(eq=False, slots=True)
class _TextStream:
    """Request whose text arrives in chunks; None is its end.

    It may be over before, at the longest audio of a call: later chunks are then dropped.
    """

    first: pb.StreamingSynthesizeRequest
    chunks: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    is_over: bool = False


class Connection:
    """Connection of one client. `serve` runs it to its end."""

    def __init__(
        self,
        host: ServerContext,
        access: AccessControl,
        client: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._host, self._access, self._client = host, access, client
        self._reader, self._writer = reader, writer
        self._events = EventReader(reader, host.config, access.slots, client)
        self._requests: asyncio.Queue[pb.SynthesizeStreamRequest | _TextStream] = asyncio.Queue()
        self._num_requests = 0  # running and waiting
        self._num_characters = 0  # in the queues
        self._text_stream: _TextStream | None = None  # the one whose text is arriving

    async def serve(self) -> None:
        """Serve until the client closes the connection or its sending side, or an error occurs."""
        try:
            try:
                with self._access.counted(self._client):
                    await self._run()
            except TTSError as error:  # not of a request: those are CallErrors already
                async with self._tracked("connection", error):
                    pass
        except CallError as error:
            await self._end(wire.to_error(error.status))
        finally:
            await self._close()

    async def _run(self) -> None:
        tasks = asyncio.create_task(self._read()), asyncio.create_task(self._speak())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _tracked(
        self, method: str, refusal: Exception | None = None
    ) -> AbstractAsyncContextManager[Call]:
        calls = self._host.calls
        return calls.track(SERVICE, method, self._client, self._send, refusal=refusal)

    # --- reading

    async def _read(self) -> None:
        """Take events until the connection ends, or is idle for too long."""
        while await self._has_next():
            event = await self._events.read(self._is_used)
            if event is None:
                return
            if self._is_used(event.type):
                await self._take(event)
            await asyncio.sleep(0)  # events that have arrived together would stop other calls

    async def _has_next(self) -> bool:
        while True:
            try:
                async with asyncio.timeout(self._host.config.idle_timeout_s):
                    return await self._events.begin()
            except TimeoutError:
                if not self._num_requests:
                    return False

    def _is_used(self, kind: str) -> bool:
        """Return whether an event is read. A text stream's whole text, which clients send again
        for servers without streaming, is not.
        """
        return kind in USED and not (kind == "synthesize" and self._text_stream is not None)

    async def _take(self, event: Event) -> None:
        match event.type:
            case "describe":
                await self._describe()
            case "ping":
                async with self._tracked("ping") as call:
                    await call.write(wire.to_pong(event.data))
            case "synthesize":
                request = wire.read_synthesize(event.data)
                self._add(request, _length(request))
            case "synthesize-start":
                self._require(self._text_stream is None, event, "a text stream is open already")
                self._text_stream = _TextStream(wire.read_start(event.data))
                self._add(self._text_stream, 0)
            case _:
                self._take_text(event)

    def _take_text(self, event: Event) -> None:
        """Add a chunk to the open text stream, or end it."""
        stream = self._text_stream
        self._require(stream is not None, event, "send synthesize-start first")
        assert stream is not None
        if event.type == "synthesize-stop":
            stream.chunks.put_nowait(None)
            self._text_stream = None
            return
        text = wire.read_chunk(event.data)
        if text and not stream.is_over:
            self._count_characters(len(text))
            stream.chunks.put_nowait(text)

    def _add(self, request: pb.SynthesizeStreamRequest | _TextStream, num_characters: int) -> None:
        if self._num_requests >= MAX_REQUESTS:
            raise StreamLimitError(
                f"this connection has {MAX_REQUESTS} requests open, which is the limit",
                subject="connection",
                retry_after_s=RETRY_S,
            )
        self._count_characters(num_characters)
        self._num_requests += 1
        self._requests.put_nowait(request)

    def _count_characters(self, number: int) -> None:
        """Count characters that are added to the queues, or with a negative number taken out."""
        self._num_characters += number
        limit = self._host.config.max_stream_characters
        if self._num_characters > limit:
            raise InvalidRequestError.of("text", f"more than {limit} characters wait here")

    @staticmethod
    def _require(holds: bool, event: Event, description: str) -> None:
        if not holds:
            raise InvalidRequestError.of(event.type, description)

    # --- responses

    async def _describe(self) -> None:
        async with self._tracked("describe") as call:
            synthesizer = self._host.speech.synthesizer
            await call.write(wire.to_info(synthesizer.voices.voices(), synthesizer.settings.model))

    async def _speak(self) -> None:
        """Speak the requests in order."""
        while True:
            request = await self._requests.get()
            if isinstance(request, _TextStream):
                await self._converse(request)
            else:
                await self._synthesize(request)
            self._num_requests -= 1

    async def _synthesize(self, request: pb.SynthesizeStreamRequest) -> None:
        async with self._tracked("synthesize") as call:
            speech = self._host.speech
            checked = speech.check(request, call.request_id)
            call.note_text(checked.text)
            await self._send_audio(call, speech.synthesizer.stream(checked))
        self._count_characters(-_length(request))

    async def _converse(self, stream: _TextStream) -> None:
        async with self._tracked("synthesize-start") as call:
            speech = self._host.speech
            checked, times = speech.check_session(stream.first, call.request_id)
            messages = self._messages(call, stream)
            await self._send_audio(call, speech.converse(checked, times, messages))
            await call.write(wire.SYNTHESIZE_STOPPED)
        stream.is_over = True
        while not stream.chunks.empty():
            self._count_characters(-len(stream.chunks.get_nowait() or ""))

    async def _messages(
        self, call: Call, stream: _TextStream
    ) -> AsyncIterator[pb.StreamingSynthesizeRequest]:
        """Yield the text of a stream. A chunk, which may be a whole text, is one or more
        fragments.
        """
        longest = self._host.config.max_fragment_characters
        while (text := await stream.chunks.get()) is not None:
            self._count_characters(-len(text))
            if call.first_input is None:
                call.first_input = time.monotonic()
            call.note_text(text)
            for start in range(0, len(text), longest):
                yield pb.StreamingSynthesizeRequest(text=text[start : start + longest])
                await asyncio.sleep(0)  # let other streams run

    async def _send_audio(
        self, call: Call, events: AsyncGenerator[SessionEvent | SpeechEvent, None]
    ) -> None:
        async with self._host.enter(call), aclosing(events):
            async for event in events:
                note_event(call, self._host.metrics, event)
                if data := wire.to_audio(event, call.sample_rate):
                    await call.write(data)

    async def _send(self, data: bytes) -> None:
        """Send one event; wait while the buffer is full. The end of the connection cancels."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError:
            raise asyncio.CancelledError from None

    # --- the end

    async def _end(self, last: bytes) -> None:
        """Send the last event and wait until the client closes, for at most LAST_WORDS_S.

        Closing while there is unread input resets the connection, and the event could be lost.
        """
        with suppress(OSError):
            async with asyncio.timeout(LAST_WORDS_S):
                self._writer.write(last)
                await self._writer.drain()
                self._writer.write_eof()
                while await self._reader.read(BLOCK_BYTES):
                    pass

    async def _close(self) -> None:
        """Close the connection; wait up to LAST_WORDS_S until the client has read the rest."""
        self._writer.close()
        with suppress(OSError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._writer.wait_closed()


def _length(request: pb.SynthesizeStreamRequest) -> int:
    """Return the number of characters of a request's text, of either kind."""
    return len(request.input.text) + len(request.input.ssml)
