"""Endless messages do not fill a front end's memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server.raw_http2 import raw_client
from tests.tts.server_process import FRONT_END, Shared, processes_of, serving_process, shared
from tts.config.server import ServerConfig
from tts.server.access import RECEIVING_BYTES

CONNECTIONS, STREAMS = 10, 40
MIB = 2**20
SENT_BYTES = 4 * MIB  # of each message
NUM_SLOTS = RECEIVING_BYTES // ServerConfig().max_message_bytes
MOST_BYTES = NUM_SLOTS * SENT_BYTES + 128 * MIB  # with the windows of all streams
METHODS = ("Synthesize", "StreamingSynthesize")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def pour_all(address: str, path: bytes, held: AsyncExitStack) -> None:
    """Open all streams and send of each message the bytes that the server accepts, not its end.

    Each connection comes from an address of its own.
    """
    clients = [
        await held.enter_async_context(raw_client(address, source=f"127.0.1.{number}"))
        for number in range(1, CONNECTIONS + 1)
    ]
    pouring = []
    for client in clients:
        for stream in range(1, 2 * STREAMS, 2):
            client.open(stream, path)
            pouring.append(client.send_body(stream, 16 * MIB - 5, SENT_BYTES))
    await asyncio.gather(*pouring)


class Peak:
    """Peak memory growth of a process while the block runs, over its first size."""

    def __init__(self, pid: int, first: int) -> None:
        self._pid = pid
        self._first = self._most = first

    @property
    def growth(self) -> int:
        return self._most - self._first

    async def __aenter__(self) -> Peak:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            self._most = max(self._most, resident_bytes(self._pid))
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Target:
    """A front end that has served a call, and its resident memory then."""

    address: str
    front_end: int
    first_bytes: int
    spoken: bytes


@asynccontextmanager
async def warm_server(checkpoint: Path) -> AsyncIterator[Target]:
    async with serving_process(checkpoint) as process:
        address = await process.ready()
        (front_end,) = processes_of(process, FRONT_END)
        async with channel_to(address) as channel:
            spoken = (await synthesize_on(channel)).data
        yield Target(address, front_end, resident_bytes(front_end), spoken)


@pytest.fixture(scope="module")
def target(tiny_checkpoint: Path) -> Iterator[Shared[Target]]:
    with shared(warm_server(tiny_checkpoint)) as server:
        yield server


@pytest.mark.parametrize("method", METHODS)
def test_unfinished_messages_do_not_fill_memory(target: Shared[Target], method: str) -> None:
    async def scenario() -> None:
        server = target.value
        async with (
            channel_to(server.address) as channel,
            AsyncExitStack() as held,
            Peak(server.front_end, server.first_bytes) as peak,
        ):
            await pour_all(server.address, f"/tts.v1.SpeechService/{method}".encode(), held)
            assert (await synthesize_on(channel)).data == server.spoken
        assert peak.growth <= MOST_BYTES, f"{peak.growth / MIB:.0f} MiB"

    target.run(scenario())
