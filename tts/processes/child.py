"""Protocol between the supervisor and a child process, and the child's main loop.

    supervisor ── Launch (pickled) ──▶ stdin        stays open; its end means: the supervisor died
    supervisor ◀── Ready (JSON, a line) ── stdout   all other output goes to stderr
    supervisor ◀── an empty line ───────── stdout   heartbeat, from then on
    supervisor ◀── Wanted (JSON, a line) ─ stdout   of a front end: calls wait for an engine

Both ends are this program in the same version, and no other process can write to the pipe, so
unpickling is safe.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from llm import PipelineRole
from tts.cli.program import end_process
from tts.config.serve import WRONG_CONFIGURATION, ServeConfig, refuse
from tts.ipc.endpoints import Endpoints, remove_leftovers
from tts.leftovers import remove_folder
from tts.observe.logs import configure_logging

logger = logging.getLogger("tts.process")

STDIN, STDOUT, STDERR = 0, 1, 2
BEAT_S = 1.0
EXIT_S = 5.0  # longest time that the kernel takes to release the locks of a killed process
ORPHANED = 70  # exit status of a child whose supervisor has exited
UNLOADED = 71  # exit status of an engine that was idle; it is started when it is wanted
DRAINED = 72  # exit status of a replica that was drained by a signal; it is started at once
ENGINE_NAME, TEXT_ENGINE_NAME = "engine", "text-engine"


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of a child. Front ends share the ports and the voices.

    `ports` are the reserved ports by the field of ServerConfig that sets them. `replicas` are the
    endpoints of all replicas of the model, of which there are several; `endpoints` are an engine's
    own, or those of the first one. `admission` is where calls are admitted with replicas and
    several front ends.
    """

    config: ServeConfig
    name: str
    endpoints: Endpoints
    ports: Mapping[str, int] = field(default_factory=dict)
    voice_folder: Path | None = None
    text_endpoints: Endpoints | None = None  # of the engine of a text model
    replicas: tuple[Endpoints, ...] = ()
    admission: Endpoints | None = None
    num_engines: int = 1  # of this model, which share the machine's cores
    is_restart: bool = False  # the server was ready before

    @property
    def is_prefill(self) -> bool:
        """Whether this is an engine that computes prompts for others."""
        return self.config.model.pipeline_role is PipelineRole.PrefillOnly

    def to_bytes(self) -> bytes:
        """Return the bytes for the child's standard input."""
        return pickle.dumps(self)


def prefill_name(number: int) -> str:
    """Return the name of an engine that computes prompts, by its number from 0."""
    return f"prefill-{number}"


def replica_name(number: int) -> str:
    """Return the name of the engine that is a replica, by its number from 0."""
    return f"{ENGINE_NAME}-{number}"


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Report of a child that is ready: what a front end serves; empty for the engine.

    `model` has the names of several models with commas.
    """

    address: str = ""
    model: str = ""
    voices: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    """Name and address of each protocol in addition to gRPC."""

    def __str__(self) -> str:
        names = ", ".join(self.voices) or "none"
        others = "".join(f" {name}={address}" for name, address in self.others)
        return f"ready: {self.address}{others} model={self.model} voices={names}"


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """Report of a front end whose calls wait for an engine, by its name; repeated."""

    engine: str


class Reporter:
    """Channel of a child to its supervisor; redirects `print` to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(STDOUT), "wb", buffering=0)
        self._beating: asyncio.Task[None] | None = None
        os.dup2(STDERR, STDOUT)

    def __call__(self, ready: Ready) -> None:
        """Report readiness; from then on send heartbeats from the event loop."""
        freeze_garbage()
        self._out.write(msgspec.json.encode(ready) + b"\n")
        os.set_blocking(self._out.fileno(), False)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    def request_engine(self, engine: str) -> None:
        """Request that an engine that was unloaded is started; does not wait for a full pipe."""
        with suppress(BrokenPipeError):
            self._out.write(msgspec.json.encode(Wanted(engine)) + b"\n")

    async def _beat(self) -> None:
        """Send heartbeats until the supervisor has exited; never wait for a full pipe."""
        with suppress(BrokenPipeError):
            while True:
                self._out.write(b"\n")
                await asyncio.sleep(BEAT_S)


class Signals:
    """Handler of SIGTERM and SIGINT: the first drains, the second ends the process at once."""

    def __init__(self, on_second: Callable[[], None] = lambda: None) -> None:
        self.asked = asyncio.Event()
        self._on_second = on_second
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)

    def _received(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            logger.warning("%s again: ending at once", number.name)
            self._on_second()
            end_process(128 + number)
        logger.info("%s: draining", number.name)
        self.asked.set()


def freeze_garbage() -> None:
    """Exclude all present objects from garbage collection; see `tune_gc`."""
    gc.collect()
    gc.freeze()


def run_child(work: Callable[[Launch, Reporter], Awaitable[int]]) -> int:
    """Read the launch parameters and run the child's work; return its exit status."""
    launch: Launch = pickle.load(sys.stdin.buffer)
    report = Reporter()
    configure_logging(launch.config.server.log_level, launch.config.server.log_format)
    try:
        return asyncio.run(_watched(work, launch, report))
    except WRONG_CONFIGURATION as error:
        return refuse(error)


async def _watched(
    work: Callable[[Launch, Reporter], Awaitable[int]], launch: Launch, report: Reporter
) -> int:
    """Run the work; stop it when the supervisor exits."""

    def orphaned() -> None:
        logger.error("the supervisor has exited: %s ends", launch.name)
        remove_leftovers(launch.config.model.zmq_endpoint_base, EXIT_S)
        if launch.admission is not None:  # which the supervisor had bound
            remove_leftovers(launch.admission.base, EXIT_S)
        if launch.voice_folder is not None:
            remove_folder(launch.voice_folder, EXIT_S)
        end_process(ORPHANED)

    asyncio.get_running_loop().add_reader(STDIN, orphaned)
    return await work(launch, report)
