"""Endless messages do not fill a front end's memory."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server.raw_http2 import raw_client
from tests.tts.server_process import FRONT_END, processes_of, serving_process
from tests.tts.serving import run

CONNECTIONS, STREAMS = 10, 40
MIB = 2**20
MOST_BYTES = 256 * MIB
METHODS = ("Synthesize", "StreamingSynthesize")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def pour_all(address: str, path: bytes, held: AsyncExitStack) -> None:
    """Open all streams and send of each message all bytes that the server accepts, but not its end.

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
            pouring.append(client.send_body(stream, 16 * MIB - 5, 15 * MIB))
    await asyncio.gather(*pouring)


class Peak:
    """Peak memory growth of a process while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first = self._most = resident_bytes(pid)

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


@pytest.mark.parametrize("method", METHODS)
def test_unfinished_messages_do_not_fill_memory(tiny_checkpoint: Path, method: str) -> None:
    async def scenario() -> None:
        async with serving_process(tiny_checkpoint) as process:
            address = await process.ready()
            (front_end,) = processes_of(process, FRONT_END)
            async with channel_to(address) as channel, AsyncExitStack() as held:
                before = await synthesize_on(channel)
                async with Peak(front_end) as peak:
                    await pour_all(address, f"/tts.v1.SpeechService/{method}".encode(), held)
                    assert (await synthesize_on(channel)).data == before.data
                assert peak.growth <= MOST_BYTES, f"{peak.growth / MIB:.0f} MiB"

    run(scenario(), 110)
