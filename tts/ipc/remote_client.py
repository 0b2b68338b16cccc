"""`RemoteEngineClient`: the engine of another process, as the front end sees it.

    keeper:  new link ─▶ welcomed ─▶ up … lost ─▶ new link ─▶ …
    speak:   Speak ─▶ Audio, Audio … (Took, Took …) ─▶ the last block, or Cancel when it is left

While there is no engine, everything asked of it raises EngineLostError at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import numpy as np
import zmq

from decoder import CodecSpec
from llm import ConfigError, Request, TokenChunk
from tts.engine_client import AudioBlock, EngineFacts, EngineStatus, SpeechJob
from tts.errors import EngineLostError
from tts.ipc.endpoints import Endpoints
from tts.ipc.engine_server import AUDIO_WINDOW, TEXT_WINDOW
from tts.ipc.link import Link, Stream
from tts.ipc.messages import (
    Answer,
    Audio,
    Codes,
    Encode,
    Enter,
    Entered,
    Generate,
    Speak,
    Tokens,
    Work,
)
from tts.ipc.pulse import LATE_S

logger = logging.getLogger("tts.ipc")

UNKNOWN = EngineStatus(0, 0, 0, 0, 0, 0, 0, is_alive=False)


class RemoteEngineClient:
    """`EngineClient` over endpoints that an `EngineServer` has bound. One event loop.

    `connect` makes one that has met its engine.
    """

    def __init__(self, endpoints: Endpoints, name: str, context: zmq.Context | None = None) -> None:
        self._endpoints, self._name = endpoints, name
        self._context = context or zmq.Context.instance()
        self._link = Link(endpoints, name, self._context)
        self._facts: EngineFacts | None = None
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, endpoints: Endpoints, name: str, context: zmq.Context | None = None
    ) -> RemoteEngineClient:
        """Wait for the engine, for as long as it loads.

        Raises ConfigError when another server's engine is there instead.
        """
        client = cls(endpoints, name, context)
        try:
            client._facts = await client._meet()
        except BaseException:
            client._link.close()
            raise
        client._keeper = asyncio.create_task(client._keep())
        return client

    def __repr__(self) -> str:
        return f"RemoteEngineClient({self._link!r})"

    @property
    def facts(self) -> EngineFacts:
        """What the engine told about its model."""
        assert self._facts is not None, "connect first"
        return self._facts

    @property
    def codec(self) -> CodecSpec | None:
        """The audio decoder's facts; None for a text-only model."""
        return self.facts.codec

    async def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        """Stream a text request. Closing the iterator cancels it.

        Raises what the engine's own client raises, and EngineLostError.
        """
        with self._reading(Generate, request, TEXT_WINDOW) as reader:
            chunk = None
            while chunk is None or chunk.finish_reason is None:
                answer = await reader.next()
                assert isinstance(answer, Tokens)
                chunk = answer.chunk
                reader.stream.has_ended = chunk.finish_reason is not None
                yield chunk

    async def speak(self, job: SpeechJob) -> AsyncIterator[AudioBlock]:
        """Stream a speech job. Closing the iterator cancels it.

        Raises what the engine's own client raises, and EngineLostError.
        """
        with self._reading(Speak, job, AUDIO_WINDOW) as reader:
            block = None
            while block is None or block.finish_reason is None:
                answer = await reader.next()
                assert isinstance(answer, Audio)
                block = answer.block
                reader.stream.has_ended = block.finish_reason is not None
                yield block

    async def encode_prompt(self, samples: np.ndarray) -> tuple[int, ...]:
        """Codes of a reference clip: mono float32 at the codec's rate."""
        with self._reading(Encode, samples, 1) as reader:
            answer = await reader.next()
            assert isinstance(answer, Codes)
            reader.stream.has_ended = True
            return answer.codes

    @asynccontextmanager
    async def place(self, client: str) -> AsyncIterator[None]:
        """A place among the calls of all front ends, for this client's call; waits for one.

        Raises ServerBusyError or StreamLimitError when there is no room, and EngineLostError.
        """
        with self._reading(Enter, client, 1) as reader:
            answer = await reader.next()
            assert isinstance(answer, Entered)
            yield

    async def status(self) -> EngineStatus:
        """The engine's newest snapshot, half a second old at most; not alive when it is silent."""
        if not self._link.is_answering:
            await asyncio.sleep(LATE_S)  # when this process stood still, the engine's signs wait
        status = self._link.status or UNKNOWN
        return status if self._link.is_answering else replace(status, is_alive=False)

    async def close(self, drain_s: float = 0.0) -> None:
        """Cancel what runs and leave; the engine goes on. Calls are drained by who serves them."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        self._link.close()

    async def _meet(self) -> EngineFacts:
        while True:
            try:
                return await self._link.welcome()
            except EngineLostError:
                self._renew()

    def _renew(self) -> None:
        self._link.close()
        self._link = Link(self._endpoints, self._name, self._context)

    async def _keep(self) -> None:
        """After a loss, meet the engine that comes next."""
        while True:
            await self._link.wait_lost()
            logger.warning("the engine has gone; what ran on it has failed")
            self._renew()
            try:
                await self._meet_again()
            except ConfigError as error:
                logger.error("%s; restart the server", error)
                self._link.close()
                return
            logger.info("the engine is there again")

    async def _meet_again(self) -> None:
        if await self._meet() != self._facts:
            raise ConfigError("the engine came back with another model")

    @contextmanager
    def _reading(self, kind: Callable[..., Work], value: object, window: int) -> Iterator[_Reader]:
        """Ask for work; whatever is left of it when the block ends is cancelled."""
        link = self._link
        stream = link.open(kind(link.name, link.new_number(), value))
        try:
            yield _Reader(link, stream, window)
        finally:
            link.close_stream(stream)


class _Reader:
    """Reads a stream, and tells the engine in time that it may send more."""

    def __init__(self, link: Link, stream: Stream, window: int) -> None:
        self.stream = stream
        self._link = link
        self._batch = max(1, window // 2)
        self._num_taken = -1  # the first item is not done with before the second is asked for

    async def next(self) -> Answer:
        self._num_taken += 1
        if self._num_taken >= self._batch:
            self._link.took(self.stream, self._num_taken)
            self._num_taken = 0
        return await self.stream.get()
