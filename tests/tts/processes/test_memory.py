"""Memory of a server's processes: endless messages do not fill it, and only an engine has torch."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.speech_server import Server
from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server.raw_http2 import raw_client
from tests.tts.server_process import ENGINE, FRONT_END, command_line
from tests.tts.serving import run
from tts.config.server import ServerConfig
from tts.server.access import RECEIVING_BYTES

CONNECTIONS, STREAMS = 10, 20
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


def libraries(pid: int) -> set[str]:
    """Return the names of the files that a process has mapped, without their suffixes."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.rpartition("/")[2].partition(".")[0] for line in maps if "/" in line}


def test_only_the_engine_has_imported_torch_and_only_its_front_end_grpc(
    tiny_server: Server,
) -> None:
    supervisor = libraries(tiny_server.pid)
    (engine,) = (libraries(pid) for pid in tiny_server.pids if ENGINE in command_line(pid))
    (front_end,) = (libraries(pid) for pid in tiny_server.pids if FRONT_END in command_line(pid))
    torch, grpc, numpy = "libtorch_cpu", "cygrpc", "_multiarray_umath"
    assert supervisor & {torch, grpc, numpy} == set()
    assert front_end & {torch, grpc, numpy} == {grpc, numpy}
    assert engine & {torch, grpc, numpy} == {torch, numpy}


@pytest.mark.parametrize("method", METHODS)
def test_unfinished_messages_do_not_fill_memory(tiny_server: Server, method: str) -> None:
    async def scenario() -> None:
        (front_end,) = [pid for pid in tiny_server.pids if FRONT_END in command_line(pid)]
        async with channel_to(tiny_server.address) as channel:
            spoken = (await synthesize_on(channel)).data
            async with (
                AsyncExitStack() as held,
                Peak(front_end, resident_bytes(front_end)) as peak,
            ):
                path = f"/tts.v1.SpeechService/{method}".encode()
                await pour_all(tiny_server.address, path, held)
                assert (await synthesize_on(channel)).data == spoken
        assert peak.growth <= MOST_BYTES, f"{peak.growth / MIB:.0f} MiB"

    run(scenario())
