"""What a child process is told when it starts, what it tells, and how it notices its end.

    supervisor ── Launch (pickled) ──▶ stdin        stays open; its end means: the supervisor died
    supervisor ◀── Ready (JSON, a line) ── stdout   everything else goes to stderr
    supervisor ◀── an empty line ───────── stdout   now and then from then on: it lives

Both ends are this program in the same version, and nobody else can write to the pipe.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from tts.ipc.endpoints import Endpoints, remove_leftovers
from tts.leftovers import remove_folder
from tts.logs import configure_logging
from tts.serve_config import WRONG_CONFIGURATION, ServeConfig, refuse

logger = logging.getLogger("tts.process")

STDIN, STDOUT, STDERR = 0, 1, 2
BEAT_S = 1.0
ORPHANED = 70  # exit status of a child whose supervisor has gone


@dataclass(frozen=True, slots=True)
class Launch:
    """What a child needs to know. Port and voices are what front ends share."""

    config: ServeConfig
    name: str
    endpoints: Endpoints
    port: int = 0
    voice_folder: Path | None = None

    def to_bytes(self) -> bytes:
        """As it is written to the child's standard input."""
        return pickle.dumps(self)


class Ready(msgspec.Struct, frozen=True):
    """A child does its work from now on. What a front end serves; empty for the engine."""

    address: str = ""
    model: str = ""
    voices: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.voices) or "none"
        return f"ready: {self.address} model={self.model} voices={names}"


class Reporter:
    """The child's way to its supervisor; from now on `print` writes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(STDOUT), "wb", buffering=0)
        self._beating: asyncio.Task[None] | None = None
        os.dup2(STDERR, STDOUT)

    def __call__(self, ready: Ready) -> None:
        """Tell it, once everything is loaded; from then on, that the event loop turns."""
        freeze_garbage()
        self._out.write(msgspec.json.encode(ready) + b"\n")
        os.set_blocking(self._out.fileno(), False)
        self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        """Until the supervisor has gone; one that does not read is not waited for."""
        with suppress(BrokenPipeError):
            while True:
                self._out.write(b"\n")
                await asyncio.sleep(BEAT_S)


class Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second ends the process at once."""

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


def end_process(status: int) -> NoReturn:
    """End without waiting for any thread."""
    logging.shutdown()
    if sys.stdout is not None:  # closed from the beginning
        sys.stdout.flush()
    os._exit(status)


def freeze_garbage() -> None:
    """What is there now stays: the garbage collector need not look through it while calls run."""
    gc.collect()
    gc.freeze()


def run_child(work: Callable[[Launch, Reporter], Awaitable[int]]) -> int:
    """Read the launch order, work; the exit status. The top of a child process."""
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
    """The work, which ends with the supervisor, however that ended."""

    def orphaned() -> None:
        logger.error("the supervisor has gone: %s ends", launch.name)
        remove_leftovers(launch.config.model.zmq_endpoint_base)
        if launch.voice_folder is not None:
            remove_folder(launch.voice_folder)
        end_process(ORPHANED)

    asyncio.get_running_loop().add_reader(STDIN, orphaned)
    return await work(launch, report)
