"""`RemoteEngineClient`: client of an engine in another process.

    keeper:  new link ─▶ welcomed ─▶ up … lost ─▶ new link ─▶ …
    speak:   Speak ─▶ Audio, Audio … (Credit, Credit …) ─▶ the last block, or Cancel

While no engine is connected, requests raise EngineLostError at once. If the engine has unloaded its
model, they have it loaded and wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import zmq

from decoder import CodecSpec
from llm import ConfigError, PoolHandle, Request, TokenChunk
from tts.engine.client import AudioBlock, EncodedClip, EngineInfo, Hold, SpeechJob
from tts.errors import EngineLostError
from tts.ipc.endpoints import Endpoints
from tts.ipc.engine_server import AUDIO_WINDOW, PAGES_WINDOW, TEXT_WINDOW
from tts.ipc.heartbeat import LATE_S
from tts.ipc.link import EngineUnloadedError, Link, Stream
from tts.ipc.messages import (
    Admit,
    Answer,
    Audio,
    Encode,
    Encoded,
    Generate,
    Pages,
    Prefill,
    Room,
    Speak,
    Tokens,
    Work,
)
from tts.observe.engine_status import EngineStatus

logger = logging.getLogger("tts.ipc")

RECONNECTED = "reconnected to the engine"  # log message
LOST = "the engine has exited; its requests have failed"
PROMPTS_LOST = "an engine for prompts has exited"
UNKNOWN = EngineStatus(0, 0, 0, 0, 0, 0, 0, is_alive=False)
UNLOADED = EngineStatus(0, 0, 0, 0, 0, 0, 0, is_loaded=False)
WAKE_S = 0.5  # between two requests to load the model


def _wake_nothing() -> None:
    pass


class RemoteEngineClient:
    """`EngineClient` for the endpoints of an `EngineServer`. One event loop.

    `connect` returns a connected client. `wake` asks for the engine to be started if its model is
    unloaded; it is called repeatedly until the engine answers.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        name: str,
        context: zmq.Context | None = None,
        wake: Callable[[], None] = _wake_nothing,
    ) -> None:
        self._endpoints, self._name, self._wake = endpoints, name, wake
        self._context = context or zmq.Context.instance()
        self._link = Link(endpoints, name, self._context)
        self._info: EngineInfo | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._was_unloaded = False
        self._connected = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        endpoints: Endpoints,
        name: str,
        context: zmq.Context | None = None,
        wake: Callable[[], None] = _wake_nothing,
    ) -> RemoteEngineClient:
        """Connect to the engine; wait while it loads.

        Raises ConfigError for the engine of another server.
        """
        client = cls(endpoints, name, context, wake)
        await client.start()
        return client

    async def start(self) -> None:
        """Connect to the engine; wait while it loads. Until then requests raise EngineLostError.

        Raises ConfigError for the engine of another server.
        """
        try:
            async with self._waking():
                self._info = await self._handshake()
        except BaseException:
            self._link.close()
            raise
        self._keeper = asyncio.create_task(self._keep())

    def __repr__(self) -> str:
        return f"RemoteEngineClient({self._link!r})"

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine's model."""
        assert self._info is not None, "connect first"
        return self._info

    @property
    def codec(self) -> CodecSpec | None:
        """Specification of the codec; None for a text-only model."""
        return self.info.codec

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request. Closing the iterator cancels it.

        Raises what the engine's own client raises, and EngineLostError.
        """
        async with self._reading(Generate, request, TEXT_WINDOW) as reader:
            if hold is not None:
                hold.on_change = partial(reader.set_held, hold)
            chunk = None
            while chunk is None or chunk.finish_reason is None:
                answer = await reader.next()
                assert isinstance(answer, Tokens)
                chunk = answer.chunk
                reader.stream.has_ended = chunk.finish_reason is not None
                yield chunk

    async def speak(
        self, job: SpeechJob, slot: RemoteStream | None = None
    ) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job. Closing the iterator cancels it.

        `slot`: one of this engine, which the job waits for there. Raises what the engine's own
        client raises, and EngineLostError.
        """
        async with self._reading(Speak, job, AUDIO_WINDOW, slot) as reader:
            block = None
            while block is None or block.finish_reason is None:
                answer = await reader.next()
                assert isinstance(answer, Audio)
                block = answer.block
                reader.stream.has_ended = block.finish_reason is not None
                yield block

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip: float32 [S], mono at the codec's rate."""
        async with self._reading(Encode, samples, 1) as reader:
            answer = await reader.next()
            assert isinstance(answer, Encoded)
            reader.stream.has_ended = True
            return answer.clip

    @asynccontextmanager
    async def prefill(self, request: Request) -> AsyncIterator[RemotePrompt]:
        """Have a prompt computed; cancel it at the end of the block if not all of its pages have
        arrived. Raises EngineLostError.
        """
        async with self._reading(Prefill, request, PAGES_WINDOW) as reader:
            yield RemotePrompt(reader)

    def admit(self, client: str) -> AbstractAsyncContextManager[RemoteStream]:
        """Request a slot among the calls of all front ends for a client's call, to the end of the
        block. It is held when the stream has its only answer, Admitted, or fails with
        ServerBusyError or StreamLimitError when a limit is reached.

        Raises EngineLostError.
        """
        return self._reading(Admit, client, 1)

    @property
    def is_unloaded(self) -> bool:
        """Whether the engine has unloaded its model and is not connected again."""
        return self._was_unloaded or self._link.is_unloaded

    @property
    def is_started(self) -> bool:
        """Whether the engine has answered once."""
        return self._info is not None

    @property
    def takes_work(self) -> bool:
        """Whether the engine is connected, sends heartbeats, and does not drain."""
        return self._link.is_answering and not self._is_draining

    @property
    def _is_draining(self) -> bool:
        status = self._link.status
        return status is not None and status.is_draining

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the engine, of all front ends, at its newest heartbeat."""
        status = self._link.status or UNKNOWN
        return status.running + status.waiting

    async def status(self) -> EngineStatus:
        """Return the engine's newest snapshot; `is_alive` is False without heartbeats.

        `is_loaded` is False for an engine that has unloaded its model, and counts as alive.
        """
        if self.is_unloaded:
            return UNLOADED
        if not self._link.is_answering:
            await asyncio.sleep(LATE_S)  # if this process was suspended, heartbeats wait to be read
        status = self._link.status or UNKNOWN
        return status if self._link.is_answering else replace(status, is_alive=False)

    async def close(self, drain_s: float = 0.0) -> None:
        """Cancel all streams and disconnect; the engine continues. The server drains the calls."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._link.close()

    async def _handshake(self) -> EngineInfo:
        while True:
            try:
                return await self._link.welcome()
            except EngineLostError:
                self._replace_link()

    def _replace_link(self) -> None:
        self._link.close()
        self._link = Link(self._endpoints, self._name, self._context)

    async def _keep(self) -> None:
        """Connect to the next engine after each loss."""
        while True:
            await self._link.wait_lost()
            self._connected.clear()
            self._was_unloaded = self._link.is_unloaded
            if not (self._was_unloaded or self._is_draining):
                logger.warning(PROMPTS_LOST if self._endpoints.by_format else LOST)
            self._replace_link()
            try:
                await self._reconnect()
            except ConfigError as error:
                logger.error("%s; restart the server", error)
                self._link.close()
                return
            logger.info(RECONNECTED)

    async def _reconnect(self) -> None:
        """Connect to the next engine; one that did not unload its model is wanted at once."""
        async with nullcontext() if self._was_unloaded else self._waking():
            info = await self._handshake()
        if info != self._info:
            raise ConfigError("the engine restarted with another model")
        self._was_unloaded = False
        self._connected.set()

    @asynccontextmanager
    async def _waking(self) -> AsyncIterator[None]:
        """Have an unloaded engine started while the block waits for it."""
        waking = asyncio.create_task(self._keep_waking())
        try:
            yield
        finally:
            waking.cancel()

    async def _keep_waking(self) -> None:
        while True:
            self._wake()
            await asyncio.sleep(WAKE_S)

    async def _open(
        self, kind: Callable[..., Work], value: object, slot: RemoteStream | None
    ) -> tuple[Link, Stream]:
        """Send a request; if the engine has unloaded its model, wait until it is loaded again.

        An engine that has replaced that of the slot does not know the slot. One that was not held
        yet is requested again first.
        """
        if slot is not None:
            await slot.repeat()
        while self.is_unloaded:
            if self._link.is_unloaded:
                self._connected.clear()  # the keeper has not noticed it yet
            async with self._waking():
                await self._connected.wait()
        link = self._link
        behind = (slot.stream.number,) if slot is not None and slot.link is link else ()
        return link, link.open(kind(link.name, link.new_number(), value, *behind))

    @asynccontextmanager
    async def _reading(
        self,
        kind: Callable[..., Work],
        value: object,
        window: int,
        slot: RemoteStream | None = None,
    ) -> AsyncIterator[RemoteStream]:
        """Send a request; cancel it at the end of the block if it has not ended."""
        send = partial(self._open, kind, value, slot)
        reader = RemoteStream(send, *await send(), window)
        try:
            yield reader
        finally:
            reader.close()


class RemotePrompt:
    """A prompt that another engine computes."""

    def __init__(self, reader: RemoteStream) -> None:
        self._reader = reader
        self.has_room = False
        """Whether the room for its pages was sent, so that the engine may write there."""

    async def pages(
        self,
        first_page: int,
        inbox: str = "",
        pool: PoolHandle | None = None,
        pages: tuple[int, ...] = (),
        *,
        wants_digest: bool = False,
    ) -> AsyncGenerator[Pages, None]:
        """Stream the pages from `first_page` on; see `messages.Room`.

        Raises what the engine's own client raises, and EngineLostError.
        """
        reader, part = self._reader, None

        def room(front_end: str, stream: int) -> Room:
            return Room(front_end, stream, first_page, inbox, pool, pages, wants_digest)

        reader.give_room(room)
        self.has_room = True
        while part is None or not part.is_last:
            answer = await reader.next()
            assert isinstance(answer, Pages)
            part = answer
            reader.stream.has_ended = part.is_last
            yield part


class RemoteStream:
    """Reader of a stream that grants credit to the engine.

    `send` repeats the request, when the engine has unloaded its model before the first answer.
    """

    def __init__(
        self,
        send: Callable[[], Awaitable[tuple[Link, Stream]]],
        link: Link,
        stream: Stream,
        window: int,
    ) -> None:
        self.link, self.stream = link, stream
        self._send = send
        self._batch = max(1, window // 2)
        self._num_taken = -1  # an item counts as read when the next one is requested
        self._is_answered = False
        self._repeating = asyncio.Lock()

    async def next(self) -> Answer:
        """Wait for the next answer. Raises the engine's error, or EngineLostError."""
        self._num_taken += 1
        if self._num_taken >= self._batch:
            self.link.took(self.stream, self._num_taken)
            self._num_taken = 0
        while True:
            try:
                answer = await self.stream.get()
            except EngineUnloadedError:
                if self._is_answered:
                    raise
                await self.repeat()
            else:
                self._is_answered = True
                return answer

    async def repeat(self) -> None:
        """Send the request again if the engine has unloaded its model before the first answer."""
        async with self._repeating:
            if self.link.is_unloaded and not self._is_answered:
                self.link, self.stream = await self._send()

    def set_held(self, hold: Hold) -> None:
        """Have the engine hold the text, or continue it."""
        self.link.set_held(self.stream, is_held=hold.is_set)

    def give_room(self, room: Callable[[str, int], Room]) -> None:
        """Send the room for the prompt's pages."""
        self.link.give_room(room(self.link.name, self.stream.number))

    def close(self) -> None:
        """Close the stream; cancel it if it has not ended."""
        self.link.close_stream(self.stream)
