"""A pool of client processes for open-loop load tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace

from benchmarks.listeners import Plan, StreamResult

SEED_STEP = 1_000_003  # distance between the seeds of two processes


class ClientPool:
    """Client processes that run plans together."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run_plan(self, plan: Plan) -> list[StreamResult]:
        """Run a share of the plan in each process; the sum of Poisson processes is a Poisson
        process.
        """
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            share = replace(plan, rate=plan.rate / count, seed=plan.seed + number * SEED_STEP)
            self._ask(process, share)
        return [one for process in self._processes for one in self._answer(process)]

    def run_in_one(self, plan: Plan) -> list[StreamResult]:
        """Run the whole plan in one process."""
        self._ask(self._processes[0], plan)
        return self._answer(self._processes[0])

    @staticmethod
    def _ask(process: subprocess.Popen[str], plan: Plan) -> None:
        assert process.stdin is not None
        print(json.dumps(asdict(plan)), file=process.stdin, flush=True)

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> list[StreamResult]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"listeners ended (exit status {process.wait()})")
        return [StreamResult(**values) for values in json.loads(line)]


@contextmanager
def client_pool(address: str, count: int) -> Iterator[ClientPool]:
    """Start client processes of one server; they are terminated at the end of the block."""
    command = [sys.executable, "-m", "benchmarks.listeners", address]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                # Ctrl-C on the terminal must not reach the clients: their results would be lost.
                subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
                )
            )
            for _ in range(count)
        ]
        try:
            yield ClientPool(processes)
        finally:
            for process in processes:
                process.terminate()
