"""Triton kernels in Triton's interpreter, in separate processes in parallel with the tests.

Triton chooses between compiler and interpreter at import, so that each program needs a process.
Together they take half a minute of one core: they start one after the other when the tests have
been collected, and a test waits for the rest of its program. When several processes run the tests
(pytest-xdist), a program starts when its test requests it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
Command = tuple[str, ...]  # a module and its arguments


class Ended(NamedTuple):
    """Result of a program."""

    output: str
    errors: str
    status: int


class Interpreter:
    """Runs commands in the background, in order, or on request."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="interpreted")
        self._running: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._ended: dict[Command, Future[Ended]] = {}
        for command in commands:
            self._submit(command)

    def result(self, command: Command) -> Ended:
        """Wait for a command's end."""
        return self._submit(command).result()

    def close(self) -> None:
        """Terminate the running command, and drop the others."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.wait()

    def _submit(self, command: Command) -> Future[Ended]:
        if command not in self._ended:
            self._ended[command] = self._pool.submit(self._run, command)
        return self._ended[command]

    def _run(self, command: Command) -> Ended:
        if self._is_closed:
            raise RuntimeError("the tests have ended")
        self._running = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *command],
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        output, errors = self._running.communicate()
        return Ended(output, errors, self._running.returncode)


RUNS = pytest.StashKey[Interpreter]()


def commands_of(item: pytest.Item) -> list[Command]:
    """Return the commands of a test: `@pytest.mark.interpreted(module, *arguments)`."""
    return [marker.args for marker in item.iter_markers("interpreted")]
