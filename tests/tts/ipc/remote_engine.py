"""A remote engine in this process: the real server, endpoints and clients."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import zmq

from decoder import AudioEncoding
from tests.deadlines import HANG_S
from tts.engine.admission import Admission
from tts.engine.client import EngineClient, EngineInfo
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer
from tts.ipc.remote_client import RemoteEngineClient


def new_base() -> str:
    """Return a new ipc base; pytest's folders may be too long for a socket's path."""
    return f"ipc://{tempfile.gettempdir()}/{secrets.token_hex(9)}"


def new_tcp_base() -> str:
    """Return a TCP base: the first of five ports that were free at the check."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, 5):
        with ExitStack() as taken, suppress(OSError):
            for port in range(first, first + 5):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return f"tcp://127.0.0.1:{first}"
    raise AssertionError("no ports")


async def wait_until(holds: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    for _ in range(round(timeout_s / 0.005)):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def engine_info_of(client: EngineClient) -> EngineInfo:
    return EngineInfo(client.codec, max_seq_len=1024, raw_encoding=AudioEncoding.PCM_S16LE)


@dataclass
class RemoteEngine:
    """One engine's server, and the clients that are connected to it."""

    server: EngineServer
    endpoints: Endpoints
    clients: list[RemoteEngineClient]
    context: zmq.Context

    @property
    def client(self) -> RemoteEngineClient:
        return self.clients[0]

    async def until_idle(self) -> None:
        """Wait until the engine's side has no stream."""
        await wait_until(lambda: self.server.num_streams == 0)


@asynccontextmanager
async def remote_engine(
    engine: EngineClient,
    base: str,
    *,
    front_ends: int = 1,
    admission: Admission | None = None,
) -> AsyncIterator[RemoteEngine]:
    """Serve an engine at a base and connect; everything is closed and gone afterwards."""
    async with AsyncExitStack() as ending:
        endpoints = ending.enter_context(reserved(base))
        context = ending.enter_context(zmq.Context())
        server = EngineServer(engine, engine_info_of(engine), endpoints, admission, context)
        await server.start()
        ending.push_async_callback(server.close)
        clients = []
        for number in range(front_ends):
            connecting = RemoteEngineClient.connect(endpoints, f"front{number}", context)
            clients.append(await asyncio.wait_for(connecting, HANG_S))
            ending.push_async_callback(clients[-1].close)
        yield RemoteEngine(server, endpoints, clients, context)
