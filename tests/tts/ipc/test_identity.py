"""Two servers that connect to each other by mistake: neither serves the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import zmq

from llm import ConfigError
from tests.tts.engine.jobs import listen, run, speech
from tests.tts.ipc.remote_engine import (
    engine_info_of,
    new_base,
    new_tcp_base,
    remote_engine,
    wait_until,
)
from tests.tts.ramp import RampClient
from tts.errors import EngineLostError
from tts.ipc.codec import bundle, decode_from_front_end, encode
from tts.ipc.endpoints import Endpoints
from tts.ipc.engine_server import EngineServer
from tts.ipc.messages import Hello, Speak, Welcome
from tts.ipc.remote_client import RemoteEngineClient


@pytest.mark.parametrize("new", [new_base, new_tcp_base])
def test_an_engine_refuses_another_servers_front_end(
    new: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        engine = RampClient()
        async with remote_engine(engine, new()) as served:
            wrong = replace(served.endpoints, server_id="other")
            with pytest.raises(ConfigError, match="belongs to another server"):
                await RemoteEngineClient.connect(wrong, "lost", served.context)
            assert "of server other is refused" in caplog.text
            assert "peers=1," in repr(served.server)
            assert await listen(served.client, speech("x"))

    run(scenario)


def test_requests_of_a_refused_front_end_are_not_run() -> None:
    """The front end ignores the refusal and sends a request."""

    async def scenario() -> None:
        engine = RampClient()
        async with remote_engine(engine, new_base()) as served:
            with (
                served.context.socket(zmq.PUSH) as control,
                served.context.socket(zmq.PUSH) as work,
            ):
                control.connect(served.endpoints.control)
                work.connect(served.endpoints.request)
                control.send(encode(Hello("rude", "other")))
                work.send(encode(Speak("rude", 0, speech("theirs"))))
                assert await listen(served.client, speech("ours"))
                await asyncio.sleep(0.1)
            assert [job.request.request_id.rpartition("/")[2] for job in engine.jobs] == ["ours"]

    run(scenario)


def test_a_front_end_refuses_another_servers_engine() -> None:
    """The engine accepts front ends of any server."""

    async def scenario() -> None:
        engine = RampClient()
        endpoints = Endpoints.of("inproc://engine", "ours")
        with zmq.Context() as context:
            control = context.socket(zmq.PULL)
            replies = context.socket(zmq.ROUTER)
            control.bind(endpoints.control)
            replies.bind(endpoints.response)
            connecting = asyncio.ensure_future(
                RemoteEngineClient.connect(endpoints, "front", context)
            )
            while not control.poll(0):
                await asyncio.sleep(0.01)
            hello = decode_from_front_end(control.recv())
            assert isinstance(hello, Hello)
            assert hello.server_id == "ours"
            welcome = Welcome("other", engine_info_of(engine), await engine.status())
            replies.send_multipart((hello.front_end.encode(), bundle([encode(welcome)])))
            with pytest.raises(ConfigError, match=r"belongs to another server \(other, this is"):
                await connecting
            control.close()
            replies.close()

    run(scenario)


def test_another_servers_engine_on_our_endpoints_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other engine binds the endpoints while ours restarts."""

    async def scenario() -> None:
        engine = RampClient()
        async with remote_engine(engine, new_tcp_base()) as served:
            await served.server.close()
            await wait_until(lambda: all(map(_is_free, served.endpoints)))
            theirs = replace(served.endpoints, server_id="theirs")
            other = EngineServer(engine, engine_info_of(engine), theirs, None, served.context)
            await other.start()
            await wait_until(lambda: "restart the server" in caplog.text)
            assert "belongs to another server (theirs, this is" in caplog.text
            with pytest.raises(EngineLostError):
                await listen(served.client, speech("x"))
            assert not (await served.client.status()).is_alive
            assert engine.jobs == []
            await other.close()

    run(scenario)


def _is_free(address: str) -> bool:
    """Return whether a port is free; ZeroMQ closes its sockets later, on another thread."""
    with suppress(OSError), socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        return True
    return False
