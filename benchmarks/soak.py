"""Soak test of a server under all kinds of calls: memory leaks, slowdown, lost calls.

    search    maximum number of real-time speech streams, as in benchmarks.serve
    steady    `--load` of them for `--minutes`: speech whole, streamed and from streamed text,
              voices cloned and deleted, text, and clients that cancel, vanish or send errors
    killing   the same for `--killing-minutes`, with engines killed at intervals

Memory, descriptors, threads and the time to the first audio late in the steady part are compared
with those after its warm-up, each the median of a window. Calls are compared one by one with the
server's log (benchmarks.soak_ledger). Server flags come after `--`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import serve
from benchmarks.client_pool import client_pool
from benchmarks.process_samples import Sample, pids_of, sample, write_samples
from benchmarks.report import Report, publish
from benchmarks.server_metrics import Samples, free_port, scrape
from benchmarks.soak_calls import SLOW_READER_S, Clients
from benchmarks.soak_ledger import Log, Window, complete
from benchmarks.soak_report import Part, held, part_figures, search_figures
from tests.speech_server import Server, serving
from tts.ipc.remote_client import RECONNECTED

KILL_EVERY_S = 180.0
NUM_KILLS = 5  # minimum number, in a short killing part
SAMPLE_S = 5.0
NUM_SAMPLES = 60  # minimum number, in a short steady part
PAUSE_S = 10.0  # between unusual calls of one client
NUM_PAUSES = 20  # minimum number, in a short steady part
DRAIN_S = 60.0  # maximum time until the last calls are released
BACK_S = 120.0  # maximum time until an engine is ready again
SETTLE_S = 1.5  # the engine's figures are up to a second old
BACK_SLACK_S = 1.0  # a front end may detect it half a second later than others
PAGES_OF_A_PROMPT, MAX_PROMPTS = 4, 256  # with the default page size
NUM_PROCESSES = 2  # client processes during the search for the largest number of streams
ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Plan:
    """Durations and loads."""

    minutes: float = 25.0
    killing_minutes: float = 15.0
    load: float = 0.8  # share of the server's maximum number of streams
    front_ends: int = 2
    setup: serve.Setup = field(
        default_factory=lambda: serve.Setup(
            warm_up_s=2.0, step_s=10.0, start=4, most=256, closeness=0.25
        )
    )

    @property
    def steady_s(self) -> float:
        return 60 * self.minutes

    @property
    def killing_s(self) -> float:
        return 60 * self.killing_minutes

    @property
    def kill_every_s(self) -> float:
        return min(KILL_EVERY_S, self.killing_s / NUM_KILLS)

    @property
    def pause_s(self) -> float:
        return min(PAUSE_S, self.steady_s / NUM_PAUSES)

    @property
    def sample_s(self) -> float:
        return min(SAMPLE_S, self.steady_s / NUM_SAMPLES)

    def flags(self, metrics_port: int) -> list[str]:
        """Return the flags that the server is started with."""
        flags = ["--front-ends", str(self.front_ends), "--metrics-port", str(metrics_port)]
        flags += ["--prometheus-metrics-mode", "launch_multiproc_server"]
        flags += ["--log-level", "info", "--log-format", "json"]
        flags += ["--slow-reader-timeout-s", str(SLOW_READER_S)]
        if self.killing_minutes:  # so that each comes before the count of restarts begins again
            flags += ["--max-restarts", str(round(self.killing_s / self.kill_every_s) + 1)]
        for limit in ("concurrent-requests", "queued-requests", "streams-per-client"):
            flags += [f"--max-{limit}", str(serve.MANY)]
        return flags


class Soak:
    """A server with its clients."""

    def __init__(self, server: Server, plan: Plan, metrics_port: int, log_file: Path) -> None:
        self._server, self._plan = server, plan
        self._metrics_port, self._log_file = metrics_port, log_file
        self._clients = Clients(server.address, plan.pause_s)
        self._rest = Samples()
        self._position = 0  # position in the log

    async def run(self, listeners: int) -> tuple[Samples, list[Part]]:
        """Return the server's values before the load, and the results of the parts."""
        plan = self._plan
        try:
            await self._clients.prepare()
            await self._clients.fill(self._num_prompts())
            before = self._rest = await self._drained()
            self._clients.calls.clear()
            self._position = self._log_file.stat().st_size
            parts = [await self._part("steady", listeners, plan.steady_s)]
            if plan.killing_minutes:
                parts.append(await self._part("killing", listeners, plan.killing_s))
            return before, parts
        finally:
            await self._clients.close()

    def _num_prompts(self) -> int:
        """Number of prompts with which the prefix cache fills the KV pool, unless it is too large.

        Pages take memory at their first use, which is not a leak.
        """
        pages = scrape(self._metrics_port).get("sonant_kv_pages", state="total")
        return min(MAX_PROMPTS, math.ceil(pages / PAGES_OF_A_PROMPT))

    async def _part(self, name: str, listeners: int, seconds: float) -> Part:
        samples: list[Sample] = []
        kills: list[Window] = []
        sampling = asyncio.create_task(self._sample(samples))
        killing = asyncio.create_task(self._kill(kills) if name == "killing" else asyncio.sleep(0))
        start_s = time.monotonic()
        await self._clients.run(listeners, seconds)
        await killing  # an engine may still be restarting
        sampling.cancel()
        former, self._rest = self._rest, await self._drained()
        start, self._position = self._position, self._log_file.stat().st_size
        log = Log.read(self._log_file, start, self._position)
        calls, self._clients.calls = self._clients.calls, []
        complete(calls, log)
        return Part(
            name,
            Window(start_s, start_s + seconds),
            tuple(calls),
            log,
            self._rest,
            self._rest - former,
            tuple(samples),
            tuple(kills),
        )

    async def _sample(self, samples: list[Sample]) -> None:
        while True:
            samples.append(await asyncio.to_thread(sample, self._server))
            await asyncio.sleep(self._plan.sample_s)

    async def _kill(self, kills: list[Window]) -> None:
        """Kill one engine after the other, the first after half a period."""
        plan = self._plan
        for _ in range(round(plan.killing_s / plan.kill_every_s)):
            await asyncio.sleep(plan.kill_every_s / 2)
            start_s = time.monotonic()
            (pid,) = pids_of(self._server, ENGINE)
            position = self._log_file.stat().st_size
            os.kill(pid, signal.SIGKILL)
            await self._back(position)
            kills.append(Window(start_s, time.monotonic() + BACK_SLACK_S))
            await asyncio.sleep(max(0.0, plan.kill_every_s / 2 - kills[-1].length_s))

    async def _back(self, position: int) -> None:
        """Wait until each front end has logged after `position` that it is connected again."""
        async with asyncio.timeout(BACK_S):
            while self._num_reconnected(position) < self._plan.front_ends:
                await asyncio.sleep(0.05)

    def _num_reconnected(self, position: int) -> int:
        with self._log_file.open("rb") as log:
            log.seek(position)
            return log.read().count(RECONNECTED.encode())

    async def _drained(self) -> Samples:
        """Return the server's counts after the last call has ended, or after DRAIN_S."""
        deadline_s = time.monotonic() + DRAIN_S
        while True:
            await asyncio.sleep(SETTLE_S)
            found = await asyncio.to_thread(scrape, self._metrics_port)
            if not any(held(found).values()) or time.monotonic() > deadline_s:
                return found


async def soak(
    server: Server, plan: Plan, metrics_port: int, log_file: Path, listeners: int
) -> tuple[Samples, list[Part]]:
    """Return the server's values before the load, and the results of the parts."""
    return await Soak(server, plan, metrics_port, log_file).run(listeners)


def search(address: str, metrics_port: int, setup: serve.Setup) -> list[serve.Step]:
    """Search for the maximum number of streams; return all steps."""
    with client_pool(address, NUM_PROCESSES) as pool:
        code_rate, multiple = serve.codes(address)
        stage = serve.Stage(pool, metrics_port, setup, code_rate, multiple, Path())
        return serve.search(stage.step, setup)


def measure(plan: Plan, folder: Path, model: str = "", flags: Sequence[str] = ()) -> Report:
    """Run everything with a new server; its log and the samples are kept in the folder."""
    port, log_file = free_port(), folder / "server.log"
    with (
        log_file.open("wb") as log,
        serving(model, [*plan.flags(port), *flags], log) as server,
    ):
        tried = search(server.address, port, plan.setup)
        held = max((step.streams for step in tried if step.holds), default=0)
        listeners = max(1, round(plan.load * held))
        before, parts = asyncio.run(soak(server, plan, port, log_file, listeners))
    figures = [*search_figures(tried, held, listeners)]
    for part in parts:
        write_samples(folder / f"{part.name}.jsonl", part.samples)
        figures += part_figures(part, before)
    return Report("soak", tuple(figures))


def parser() -> argparse.ArgumentParser:
    """The command line, without the server's flags."""
    own = Plan()
    options = argparse.ArgumentParser(
        description="A server for a long time under all kinds of clients.", allow_abbrev=False
    )
    options.add_argument(
        "--minutes", type=_positive, default=own.minutes, help="of the steady part"
    )
    options.add_argument(
        "--killing-minutes",
        type=_not_negative,
        default=own.killing_minutes,
        help="then, with engines killed; 0: none",
    )
    options.add_argument(
        "--load",
        type=_positive,
        default=own.load,
        help="share of the streams that the server holds",
    )
    options.add_argument("--front-ends", type=int, default=own.front_ends)
    options.add_argument("--model", default="", help="checkpoint folder (default: built-in voice)")
    options.add_argument("--keep", type=Path, help="folder for the server's log and the samples")
    return options


def _not_negative(text: str) -> float:
    number = float(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be 0 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    args = parser().parse_args(given[:split])
    plan = Plan(args.minutes, args.killing_minutes, args.load, args.front_ends)
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        return publish(measure(plan, folder, args.model, given[split + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
