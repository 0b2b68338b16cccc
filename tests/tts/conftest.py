"""Fixtures of the service's tests: a synthesizer without a language model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.speech_server import Server
from tests.tts.command_line import Say
from tests.tts.family_checkpoints import ramp_codec, write_llasa, write_neutts
from tests.tts.family_services import CASES, Case, Running, configured
from tests.tts.ramp import RampClient, build
from tests.tts.server_process import Killable, Shared, killable_server, shared
from tts.factory import Service, create_service
from tts.say import main
from tts.speech.synthesizer import Synthesizer


@pytest.fixture
def client() -> RampClient:
    return RampClient()


@pytest.fixture
def synthesizer(client: RampClient, tiny_checkpoint: Path) -> Synthesizer:
    return build(client, tiny_checkpoint)


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of `built_in`."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def built_in_service(runner: asyncio.Runner) -> Iterator[Service]:
    """The service of the built-in voice; shared by tests, so leave it running."""
    service = create_service()
    yield service
    runner.run(service.client.close())


@pytest.fixture(scope="session")
def built_in(built_in_service: Service) -> Synthesizer:
    """The synthesizer of the built-in voice."""
    assert built_in_service.synthesizer is not None
    return built_in_service.synthesizer


@pytest.fixture
def server(tiny_server: Server) -> str:
    """The address of a server process on the tiny checkpoint."""
    return tiny_server.address


@pytest.fixture(scope="session")
def killable_processes(tiny_checkpoint: Path) -> Iterator[Shared[Killable]]:
    """The server of `killable`."""
    with shared(killable_server(tiny_checkpoint)) as server:
        yield server


@pytest.fixture
def killable(killable_processes: Shared[Killable]) -> Iterator[Shared[Killable]]:
    """A server whose processes a test may kill; those are started again before the next test."""
    yield killable_processes
    killable_processes.run(killable_processes.value.until_whole())


@pytest.fixture(params=["local", "remote"])
def say(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Say:
    """The command line in this process, with a local model and with a server."""
    if request.param == "local":
        where = ["--model", str(tiny_checkpoint)]
    else:
        where = ["--server", request.getfixturevalue("server")]
    return lambda *arguments: main([*map(str, arguments), *where])


@pytest.fixture(scope="session", params=CASES, ids=lambda case: case.name)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The whole service of each speech family, on random weights."""
    case: Case = request.param
    folder = case.write(tmp_path_factory.mktemp("families") / case.name)
    service = create_service(configured(folder))
    yield Running(case, service, folder)
    asyncio.run(service.client.close())


@pytest.fixture(scope="session")
def llasa(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llasa with a codec that encodes."""
    return write_llasa(tmp_path_factory.mktemp("models") / "llasa", ramp_codec(16_000))


@pytest.fixture(scope="session")
def neutts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NeuTTS with a codec that encodes."""
    return write_neutts(tmp_path_factory.mktemp("models") / "neutts", ramp_codec(24_000))
