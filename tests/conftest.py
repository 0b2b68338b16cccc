"""Fixtures shared by every test: the tiny checkpoint, a running engine client, the leak check."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
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

# The duration of an example depends on the load of the machine.
settings.register_profile(
    "suite", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# Without files of compiled modules, each process that a test starts compiles all of ours.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of torch that spin take the cores of other processes. It is read when a process begins:
# a program that a test starts, and one of several that run the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

gc.disable()  # until all modules are imported and all tests collected: almost nothing is garbage

# Background jobs of a shell ignore SIGINT, which programs started by tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from tests.speech_server import Server
    from tts.engine.local_client import LocalEngineClient
    from tts.factory import Service


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule neighbouring tests on the same process, because they share fixtures."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the interpreted programs in the background, unless several processes run the tests."""
    gc.freeze()  # half a million objects of modules and tests, which every collection would visit
    gc.set_threshold(10_000, 20, 20)  # seldom: what tests import later is visited, too
    gc.enable()
    if session.config.option.collectonly:
        return
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    commands = [command for item in session.items for command in commands_of(item)]
    session.stash[RUNS] = Interpreter(commands if is_alone else ())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the interpreted programs that were not waited for."""
    if RUNS in session.stash:
        session.stash[RUNS].close()


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Ended:
    """Return the output of the test's own command when it has ended."""
    (command,) = commands_of(request.node)
    return request.session.stash[RUNS].result(command)


@pytest.fixture
def only_new_objects() -> None:
    """Let collections of garbage visit only what a test creates: benchmarks start many, and each
    would visit the objects of all modules that earlier tests have imported.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """Limit the threads: tests check behaviour, not speed, and often run in parallel."""
    torch.set_num_threads(num_threads())
    set_product_threads(num_threads())


def num_threads() -> int:
    """Return the number of threads that `tests.processors` requests, otherwise one."""
    return int(os.environ.get(processors.THREADS, "1"))


@pytest.fixture(autouse=True)
def one_product_thread(few_threads: None) -> None:
    """Limit them again: a service takes all cores, on which other tests and servers run, too."""
    set_product_threads(num_threads())


@pytest.fixture(scope="session", autouse=True)
def other_blas() -> Iterator[None]:
    """Replace torch's products if `tests.processors` requests it."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(processors.BLAS) == processors.ORDER_CHANGING:
            order_changing.install(patch)
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore logging, which a command in this process configures globally."""
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
    """The whole service on the tiny checkpoint; shared by tests, so leave it running."""
    from tts.factory import create_service

    service = create_service(tiny_config(tiny_checkpoint))
    yield service
    asyncio.run(service.client.close())


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path) -> Iterator[Server]:
    """A `python -m tts.serve` process on the tiny checkpoint, with HTTP, for client programs."""
    from tests.speech_server import serving

    with serving(str(tiny_checkpoint), ["--http-port=0"]) as server:
        yield server


@pytest.fixture(scope="session")
def shared_client(tiny_checkpoint: Path) -> Iterator[LocalEngineClient]:
    """One engine on the tiny checkpoint, without the service."""
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
    """Create clients for tests that need their own; they are closed afterwards."""
    built: list[LocalEngineClient] = []

    def build(**options: Any) -> LocalEngineClient:
        built.append(create_client(tiny_checkpoint, **options))
        return built[-1]

    yield build
    for client in built:
        asyncio.run(client.close())
