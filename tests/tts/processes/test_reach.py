"""The supervisor connects as a client: unreachable front ends are restarted."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server_process import FRONT_END, impatient_process, processes_of
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


DEAF = '''
"""Llama, in a process that stops listening when there is a file called deaf next to this one."""

import os
import socket
import threading
import time
from pathlib import Path

from llm import Architecture

MARK = Path(__file__).with_name("deaf")
ARCHITECTURES = [Architecture("DeafForCausalLM", "llm.models.llama:LlamaModel")]


def stop_listening():
    while not MARK.exists():
        time.sleep(0.01)
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and found.family in (socket.AF_INET, socket.AF_INET6):
            found.shutdown(socket.SHUT_RDWR)
        found.close()
    MARK.unlink()


if b"tts.processes.front_end" in Path("/proc/self/cmdline").read_bytes():
    threading.Thread(target=stop_listening, daemon=True).start()
'''


def test_a_front_end_that_accepts_no_connections_is_restarted(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The process and its event loop run; only new connections fail."""
    (tmp_path / "deaf.py").write_text(DEAF)
    model = Path(shutil.copytree(tiny_checkpoint, tmp_path / "model"))
    values = json.loads((model / "config.json").read_text())
    values["architectures"] = ["DeafForCausalLM"]
    (model / "config.json").write_text(json.dumps(values))

    async def scenario() -> None:
        flags = {"custom-architectures": f"{tmp_path}:deaf"}
        async with impatient_process(model, **flags) as process:
            address = await process.ready()
            async with channel_to(address) as channel:
                before = await synthesize_on(channel)
            (front_end,) = processes_of(process, FRONT_END)
            (tmp_path / "deaf").touch()
            await process.logged("front-end-0 takes no connections: killing it")
            await process.logged("front-end-0 is back")
            async with channel_to(address) as channel:
                assert (await synthesize_on(channel)).data == before.data
            assert processes_of(process, FRONT_END) != [front_end]

    run(scenario())
