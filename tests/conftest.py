"""Fixtures shared by every test: the tiny checkpoint, a running engine client, the leak check."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from llm import set_product_threads
from tests import order_changing, processors
from tests.fakes import (
    build_text_checkpoint,
    build_tiny_checkpoint,
    create_client,
    tiny_config,
    wait_until_idle,
)
from tests.interpreted import RUNS, Ended, Interpreter, commands_of

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# A shell's background job ignores SIGINT, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from benchmarks.serving import Server
    from tts.factory import Service
    from tts.speech_engine import LocalEngineClient


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours share fixtures: a process keeps to its half as long as the other has work, too."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start what is to be interpreted, unless other processes run tests meanwhile."""
    if session.config.option.collectonly:
        return
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    commands = [command for item in session.items for command in commands_of(item)]
    session.stash[RUNS] = Interpreter(commands if is_alone else ())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End it, if nobody has waited for it."""
    if RUNS in session.stash:
        session.stash[RUNS].close()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Ended:
    """What the test's own command left, when it has ended."""
    (command,) = commands_of(request.node)
    return request.session.stash[RUNS].result(command)


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Tests measure behaviour, not speed, and often run beside each other."""
    count = int(os.environ.get(processors.THREADS, "1"))
    torch.set_num_threads(count)
    set_product_threads(count)


@pytest.fixture(scope="session", autouse=True)
def other_blas() -> Iterator[None]:
    """Replaces torch's products where `tests.processors` asks for that."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(processors.BLAS) == processors.ORDER_CHANGING:
            order_changing.install(patch)
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that runs in this process sets logging up for all of it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A speech checkpoint with random weights."""
    return build_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model without a codec."""
    return build_text_checkpoint(tmp_path_factory.mktemp("models") / "text")


@pytest.fixture(scope="session")
def tiny_service(tiny_checkpoint: Path) -> Iterator[Service]:
    """The whole service on the tiny checkpoint; tests share it, so leave it running."""
    from tts.factory import create_service

    service = create_service(tiny_config(tiny_checkpoint))
    yield service
    asyncio.run(service.client.close())


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[Server]:
    """A `python -m tts.serve` process on the tiny checkpoint, for clients that are programs."""
    from benchmarks.serving import serving

    with serving(str(tiny_checkpoint)) as server:
        yield server


@pytest.fixture(scope="session")
def shared_client(tiny_checkpoint: Path) -> Iterator[LocalEngineClient]:
    """One engine on the tiny checkpoint, without the parts above it."""
    client = create_client(tiny_checkpoint)
    yield client
    asyncio.run(client.close())


@pytest.fixture
def engine_client(shared_client: LocalEngineClient) -> Iterator[LocalEngineClient]:
    """The shared engine; fails the test that leaves a page, a row or an audio stream behind."""
    yield shared_client
    asyncio.run(wait_until_idle(shared_client))


@pytest.fixture
def service(tiny_service: Service) -> Iterator[Service]:
    """The shared service, with the same check."""
    yield tiny_service
    asyncio.run(wait_until_idle(tiny_service.client))


@pytest.fixture
def own_client(tiny_checkpoint: Path) -> Iterator[Callable[..., LocalEngineClient]]:
    """Builds clients for tests that need their own; they are closed afterwards."""
    built: list[LocalEngineClient] = []

    def build(**options: Any) -> LocalEngineClient:
        built.append(create_client(tiny_checkpoint, **options))
        return built[-1]

    yield build
    for client in built:
        asyncio.run(client.close())
