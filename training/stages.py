"""Runner of stages: each in a process with its own log, or in this process.

A stage that is running, or was interrupted, leaves `NAME.unfinished` next to its output, so that a
resumed run recognises incomplete output.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


class StageError(Exception):
    """A stage failed; the message names its log."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One command, and the file that it creates."""

    name: str
    module: str
    arguments: tuple[object, ...]
    output: Path

    @property
    def command(self) -> list[str]:
        return [self.module, *map(str, self.arguments)]


class Running:
    """The processes of one stage."""

    def __init__(self, stage: Stage, processes: Sequence[subprocess.Popen], log: Path) -> None:
        self.stage, self._processes, self._log = stage, processes, log

    def wait_until(self, moment: float) -> None:
        """Wait until `time.time()` reaches a value, or all processes have ended."""
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, moment - time.time()))

    def end(self) -> None:
        """Terminate the processes."""
        for process in self._processes:
            process.terminate()
            process.wait()

    def wait(self) -> None:
        """Wait for the processes. Raises StageError."""
        codes = [process.wait() for process in self._processes]
        if any(codes):
            raise StageError(f"{self.stage.name} failed: see {self._log}")
        _marker(self.stage).unlink(missing_ok=True)


class Launcher:
    """Starts stages that write to one folder."""

    def __init__(self, out: Path, environment: dict[str, str] | None = None) -> None:
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})

    def start(self, stage: Stage, gpus: str = "") -> Running:
        """Start one process; `gpus` is CUDA_VISIBLE_DEVICES."""
        return Running(stage, [self._spawn(stage, stage.name, gpus)], self._log(stage.name))

    def start_group(self, stage: Stage, gpus: Sequence[int]) -> Running:
        """Start one process per GPU (one on the CPU when there is none)."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        size, visible = max(1, len(gpus)), ",".join(map(str, gpus))
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for rank in range(size)
        ]  # fmt: skip
        names = [f"{stage.name}{rank}" for rank in range(size)]
        processes = [
            self._spawn(stage, name, visible, more) for name, more in zip(names, ranks, strict=True)
        ]
        return Running(stage, processes, self._log(names[0]))

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def _spawn(
        self, stage: Stage, name: str, gpus: str, more: dict[str, str] | None = None
    ) -> subprocess.Popen:
        _marker(stage).touch()
        environment = self._environment | {"CUDA_VISIBLE_DEVICES": gpus} | (more or {})
        with self._log(name).open("w") as log:  # the child process has it, too
            return subprocess.Popen(
                [sys.executable, "-m", *stage.command], env=environment, stdout=log, stderr=log
            )


def is_done(stage: Stage) -> bool:
    """Whether its output is complete."""
    return stage.output.exists() and not is_being_made(stage.output)


def is_being_made(output: Path) -> bool:
    """Whether a stage is running, or was interrupted."""
    return _marker_of(output).exists()


def give_up(stage: Stage) -> None:
    """Remove the output of a failed stage; stages that wait for it continue without it."""
    stage.output.unlink(missing_ok=True)
    _marker(stage).unlink(missing_ok=True)


def run_here(stage: Stage) -> None:
    """Run the stage's `main` in this process."""
    _marker(stage).touch()
    import_module(stage.module).main(stage.command[1:])
    _marker(stage).unlink()


def _marker(stage: Stage) -> Path:
    stage.output.parent.mkdir(parents=True, exist_ok=True)
    return _marker_of(stage.output)


def _marker_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.unfinished")


def sleep_until(moment: float) -> None:
    """Sleep until `time.time()` reaches a value."""
    time.sleep(max(0.0, moment - time.time()))
