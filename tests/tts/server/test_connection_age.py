"""Connections that grow old: their client connects again, to another server, and loses no call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle

import grpc
import pytest

from tests.tts.serving import (
    CHANNEL_OPTIONS,
    collect_speech,
    run,
    say,
    serving,
    session_config,
    unary_request,
)
from tts.config.server import ServerConfig
from tts.factory import Service
from tts.server.server import server_options
from tts.v1.speech_pb2_grpc import SpeechServiceStub

AGE_S = 0.3
HANDLED = {
    "grpc_service": "tts.v1.SpeechService", "grpc_method": "Synthesize", "grpc_code": "OK"
}  # fmt: skip


class Balancer:
    """Forwarder of TCP connections to several servers in turn, as a cluster's address does."""

    def __init__(self, ports: list[int]) -> None:
        self._next = cycle(ports)
        self.num_connections = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a client to the next server until either side closes."""
        self.num_connections += 1
        near, far = await asyncio.open_connection("127.0.0.1", next(self._next))
        await asyncio.gather(_copy(reader, far), _copy(near, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def forwarding(ports: list[int]) -> AsyncIterator[tuple[Balancer, str]]:
    """Listen for connections to a balancer of these ports, at the address."""
    balancer = Balancer(ports)
    async with await asyncio.start_server(balancer.forward, "127.0.0.1", 0) as listener:
        yield balancer, "{}:{}".format(*listener.sockets[0].getsockname())


@asynccontextmanager
async def balanced(ports: list[int]) -> AsyncIterator[tuple[Balancer, SpeechServiceStub]]:
    """Open a channel to a balancer of these ports."""
    async with (
        forwarding(ports) as (balancer, address),
        grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel,
    ):
        yield balancer, SpeechServiceStub(channel)


def test_a_client_moves_to_another_server_without_a_failed_call(service: Service) -> None:
    """It calls without a pause on one channel until each of two servers had several calls."""

    async def scenario() -> None:
        async with (
            serving(service, max_connection_age_s=AGE_S) as one,
            serving(service, max_connection_age_s=AGE_S) as two,
            balanced([one.server.port, two.server.port]) as (balancer, stub),
        ):
            num_calls = 0
            while balancer.num_connections < 5:
                assert (await stub.Synthesize(unary_request("Yes."))).audio
                num_calls += 1
            counts = [s.metric("grpc_server_handled_total", **HANDLED) for s in (one, two)]
            assert sum(counts) == num_calls
            assert min(counts) > 0

    run(scenario())


def test_a_stream_outlives_its_connections_age(service: Service) -> None:
    """It gets the same audio as on a young connection, and the next call has a new one."""

    async def scenario() -> None:
        async with (
            serving(service, max_connection_age_s=AGE_S) as served,
            balanced([served.server.port]) as (balancer, stub),
        ):
            expected = (await collect_speech(served)).data
            running = stub.StreamingSynthesize()
            await running.write(session_config())
            await running.read()
            while balancer.num_connections < 3:  # by then the stream's connection is old
                await stub.Synthesize(unary_request("Yes."))
            await running.write(say("Hello there. This is a short test."))
            await running.done_writing()
            data, response = b"", await running.read()
            while response.WhichOneof("event") != "done":
                data += response.audio.data
                response = await running.read()
            assert data == expected

    run(scenario())


@pytest.mark.parametrize("age_s", [None, 2.5])
def test_connections_have_an_age_only_on_request(age_s: float | None) -> None:
    options = dict(server_options(ServerConfig(max_connection_age_s=age_s)))
    assert options.get("grpc.max_connection_age_ms") == (age_s and 2500)
