"""The supervisor connects as a client: unreachable front ends are restarted."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.tts.serving import run
from tts.config.server import ServerConfig
from tts.processes.reach import is_reachable, unreachable
from tts.server.server import SpeechServer

TLS = Path(__file__).parents[1] / "tls"
FILES = {"tls_cert": TLS / "server.pem", "tls_key": TLS / "server.key"}


@pytest.mark.parametrize(
    "values",
    [{}, {"auth_token": "secret"}, FILES, {**FILES, "tls_client_ca": TLS / "ca.pem"}],
    ids=["plain", "token", "tls", "mtls"],
)
def test_a_server_that_listens_is_reached(values: dict[str, Any]) -> None:
    async def scenario() -> None:
        config = ServerConfig(port=0, **values)
        server = SpeechServer(config)
        await server.start()
        assert await is_reachable(config, server.port)
        await server.stop()
        assert not await is_reachable(config, server.port)

    run(scenario())


def test_a_port_without_answers_is_not_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tts.processes.reach.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert not run(is_reachable(ServerConfig(), port))


def test_the_timeout_starts_with_the_first_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is still starting is not killed."""
    monkeypatch.setattr("tts.processes.reach.PERIOD_S", 0.02)

    async def scenario() -> None:
        config = ServerConfig(port=0)
        server = SpeechServer(config)
        await server.start()
        port = server.port
        await server.stop()
        waiting = asyncio.create_task(unreachable(config, port, 0.2))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        second = SpeechServer(ServerConfig(port=port))
        await second.start()
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await second.stop()
        await waiting

    run(scenario())
