"""Several processes of listeners, as one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

from benchmarks.listeners import Heard, Plan

SEED_STEP = 1_000_003  # between the seeds of two processes


class Crowd:
    """Processes that carry plans out together."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def hear(self, plan: Plan) -> list[Heard]:
        """A share of the plan each; independent Poisson arrivals add up to Poisson arrivals."""
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            share = replace(plan, rate=plan.rate / count, seed=plan.seed + number * SEED_STEP)
            self._ask(process, share)
        return [one for process in self._processes for one in self._answer(process)]

    def hear_alone(self, plan: Plan) -> list[Heard]:
        """All of it in one process."""
        self._ask(self._processes[0], plan)
        return self._answer(self._processes[0])

    @staticmethod
    def _ask(process: subprocess.Popen[str], plan: Plan) -> None:
        assert process.stdin is not None
        print(json.dumps(asdict(plan)), file=process.stdin, flush=True)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> list[Heard]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"listeners ended (exit status {process.wait()})")
        return [Heard(**values) for values in json.loads(line)]


@contextmanager
def crowd(address: str, count: int) -> Iterator[Crowd]:
    """So many processes of listeners of one server; they end with the block."""
    command = [sys.executable, "-m", "benchmarks.listeners", address]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                # Ctrl-C on the terminal is for us, and what they hear then is nobody's.
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
                )
            )
            for _ in range(count)
        ]
        try:
            yield Crowd(processes)
        finally:
            for process in processes:
                process.terminate()
