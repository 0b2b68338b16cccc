"""`ReplicatedClient`: client of several engines with the same model, its replicas.

    request ─▶ key: adapter, else voice, else first tokens ─▶ preferred replica
               it has MARGIN streams more than the least loaded one ─▶ the least loaded one

Requests with one key share an adapter or cached pages, which only the engine that has them can
use. All front ends prefer the same replica for a key. A request stays where it began.

Heartbeats tell the load of a replica with all front ends' streams, but up to half a second late:
if front ends went by them alone, all would choose the same replica until the next one. So a front
end goes by its own streams first, each of which counts for all front ends: the others open as many.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import numpy as np

from decoder import CodecSpec
from llm import Request, Token, TokenChunk
from tts.engine.client import AudioBlock, EncodedClip, EngineInfo, Hold, SpeechJob
from tts.ipc.remote_client import RemoteEngineClient
from tts.observe.engine_status import ReplicatedStatus

logger = logging.getLogger("tts.ipc")

MARGIN = 2
"""Streams more than the least loaded replica has, own or reported, with which a preferred one is
left."""
OWN_WEIGHT = 3
"""Weight of a front end's own streams against those of the last heartbeat."""
KEY_TOKENS = 32
"""Number of tokens at the start of a voice or prompt by which a replica is preferred."""

Key = str | tuple[Token, ...]


class ReplicatedClient:
    """`EngineClient` of several engines in other processes. One event loop.

    `connect` returns a connected client. A replica that is lost, drains or sends no heartbeats gets
    no requests until it answers again. `num_clients`: front ends of the server.
    """

    def __init__(self, replicas: Sequence[RemoteEngineClient], num_clients: int = 1) -> None:
        self.replicas = tuple(replicas)
        self._num_clients = num_clients
        self._num_open = [0] * len(self.replicas)  # of this front end's streams
        self._info: EngineInfo | None = None
        self._starting: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls, replicas: Sequence[RemoteEngineClient], num_clients: int = 1, *, waits_for_all: bool
    ) -> ReplicatedClient:
        """Connect to the replicas, which are not started; wait for all of them, or for the first.

        The others join when they answer. Raises ConfigError for the engine of another server.
        """
        client = cls(replicas, num_clients)
        client._starting = [asyncio.create_task(replica.start()) for replica in replicas]
        wanted = asyncio.FIRST_EXCEPTION if waits_for_all else asyncio.FIRST_COMPLETED
        try:
            started, _ = await asyncio.wait(client._starting, return_when=wanted)
            for start in started:
                start.result()
        except BaseException:
            await client.close()
            raise
        for start in client._starting:
            start.add_done_callback(_report)
        client._info = next(replica.info for replica in replicas if replica.is_started)
        return client

    def __repr__(self) -> str:
        return f"ReplicatedClient({', '.join(map(repr, self.replicas))}, open={self._num_open})"

    @property
    def info(self) -> EngineInfo:
        """Properties of the replicas' model."""
        assert self._info is not None, "connect first"
        return self._info

    @property
    def codec(self) -> CodecSpec | None:
        """Specification of the codec; None for a text-only model."""
        return self.info.codec

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        """Stream a text request; see `RemoteEngineClient.generate`."""
        key = request.lora or request.prompt_ids[:KEY_TOKENS]
        with self._chosen(key) as replica:
            async with aclosing(replica.generate(request, hold)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        """Stream a speech job; see `RemoteEngineClient.speak`."""
        request = job.request
        key = request.lora or (job.prompt_codes or request.prompt_ids)[:KEY_TOKENS]
        with self._chosen(key) as replica:
            async with aclosing(replica.speak(job)) as blocks:
                async for block in blocks:
                    yield block

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        """Encode a reference clip: float32 [S], mono at the codec's rate."""
        with self._chosen("") as replica:
            return await replica.encode_prompt(samples)

    async def status(self) -> ReplicatedStatus:
        """Return the newest snapshots; see `RemoteEngineClient.status`."""
        return ReplicatedStatus.of(await asyncio.gather(*(r.status() for r in self.replicas)))

    async def close(self, drain_s: float = 0.0) -> None:
        """Cancel all streams and disconnect; the engines continue."""
        for start in self._starting:
            start.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(replica.close(drain_s) for replica in self.replicas))

    @contextmanager
    def _chosen(self, key: Key) -> Iterator[RemoteEngineClient]:
        """Yield the replica for a stream that is open while the block runs."""
        number = self._choose(key)
        self._num_open[number] += 1
        try:
            yield self.replicas[number]
        finally:
            self._num_open[number] -= 1

    def _choose(self, key: Key) -> int:
        """Return the number of the replica for a new stream.

        Without any that takes work, the stream fails on the preferred one.
        """
        preferred = preferred_of(key, len(self.replicas))
        loads = {
            number: Load(self._num_open[number], replica.num_sequences)
            for number, replica in enumerate(self.replicas)
            if replica.takes_work
        }
        return choose(preferred, loads, self._num_clients)


def preferred_of(key: Key, count: int) -> int:
    """Return which of `count` engines is preferred for a key."""
    return zlib.crc32(repr(key).encode()) % count


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of an engine: those of the client that chooses, and all at its last heartbeat."""

    own: int
    reported: int


def choose(preferred: int, loads: Mapping[int, Load], num_clients: int = 1) -> int:
    """Return the number of the engine for new work: the preferred one, unless another one has
    clearly less load. `loads`: those of the engines that take work; `num_clients`: clients that
    choose among them, as far as is known.
    """

    def total(number: int) -> int:
        load = loads[number]
        return OWN_WEIGHT * num_clients * load.own + load.reported

    least = min(loads, key=total, default=preferred)
    if preferred not in loads:
        return least
    near, far = loads[preferred], loads[least]
    is_near = near.own < far.own + MARGIN and near.reported < far.reported + MARGIN
    return preferred if is_near else least


def _report(start: asyncio.Task[None]) -> None:
    """Log why a replica did not join."""
    error = None if start.cancelled() else start.exception()
    if error is not None:
        logger.error("%s; restart the server", error)
