"""Cost of the scheduler: schedule and commit, with 512 requests running and 2,000 waiting.

There is no model: each row of a batch gets a token at once. Requests end continuously and waiting
ones take their places, so that steps that only decode and steps that admit prompts are both
measured. Times are processor time of the thread, which other programs on the machine affect little;
the wall-clock median is a note.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Figure, Report, arguments, publish
from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.kv_cache.manager import KVCacheManager
from llm.request import Request, SamplingParams
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import Sequence as LiveSequence
from tts.processes.collector import tune_gc

RUNNING = 512
WAITING = 2000
BAR_MS = 1.0
STEPS = 500  # measured in one repetition
PROMPT_LEN = 60
PAGE_SIZE = 128
STOP_ID = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """One step: its mode and its time."""

    mode: ForwardMode
    cpu_ms: float
    wall_ms: float


class Stopwatch:
    """Adds up the time of its `with` blocks."""

    def __init__(self) -> None:
        self._cpu = self._wall = 0

    def __enter__(self) -> None:
        self._cpu -= time.thread_time_ns()
        self._wall -= time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._cpu += time.thread_time_ns()
        self._wall += time.perf_counter_ns()

    def cost(self, mode: ForwardMode) -> Cost:
        """Return the time so far as the cost of a step."""
        return Cost(mode, self._cpu / 1e6, self._wall / 1e6)


class Load:
    """A scheduler with `running` rows and `waiting` requests.

    `ahead`: a step is planned while the previous one runs, as with the overlap scheduler.
    """

    def __init__(self, running: int, waiting: int, *, ahead: bool = False) -> None:
        self._waiting = waiting
        self._ahead = ahead
        self._numbers = itertools.count()
        self._launched: ScheduledBatch | None = None
        limits = SchedulerLimits(max_batch_size=running)
        kv = KVCacheManager(running * 4 + 1, PAGE_SIZE)
        self.scheduler = Scheduler(limits, kv, max_seq_len=1024, plan_ahead=ahead)
        self._refill()
        while self.scheduler.num_running < running:
            self.step()

    def _refill(self) -> None:
        missing = self._waiting - self.scheduler.num_waiting
        for number in itertools.islice(self._numbers, max(missing, 0)):
            prompt = tuple(number * 7 % 1000 + index for index in range(PROMPT_LEN))
            # different lengths, so that requests do not all end at once
            length = 120 + number * 37 % 160
            sampling = SamplingParams(max_tokens=length, stop_token_ids=(STOP_ID,))
            self.scheduler.add(LiveSequence(Request(f"request-{number:08}", prompt, sampling)))

    def step(self) -> Cost:
        """Run one step; time between schedule, launch and commit is not counted."""
        watch, scheduler = Stopwatch(), self.scheduler
        with watch:
            batch = scheduler.schedule()
        due = self._launched if self._ahead else batch
        if due is not None:
            output = answer(due)
            with watch:
                scheduler.commit(due, output)
        if self._ahead:
            with watch:
                scheduler.launched(batch)
            self._launched = batch
        self._refill()
        return watch.cost(batch.mode)


@contextmanager
def tuned_gc() -> Iterator[None]:
    """Tune garbage collection as in a server process."""
    former = gc.get_threshold()
    tune_gc()
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()


def answer(batch: ScheduledBatch) -> StepOutput:
    """Return a token, never the stop id, for every row that samples."""
    return StepOutput({row.request_id: (7,) for row in batch.rows if row.samples})


def measure(
    repeat: int, steps: int = STEPS, running: int = RUNNING, waiting: int = WAITING
) -> Report:
    """Measure a step with so many requests, `repeat` times over `steps` steps."""
    load, ahead = Load(running, waiting), Load(running, waiting, ahead=True)
    with tuned_gc():
        rounds = [[load.step() for _ in range(steps)] for _ in range(repeat)]
        rounds_ahead = [[ahead.step() for _ in range(steps)] for _ in range(repeat)]
    size = f"{running} rows, {waiting} wait"
    return Report(
        "scheduler",
        (
            _figure("a step, schedule + commit", rounds, bar=BAR_MS, note=size),
            _figure("of them, only decode", rounds, ForwardMode.DECODE),
            _figure("of them, with prompts", rounds, ForwardMode.MIXED),
            _figure("a step, planned ahead (overlap)", rounds_ahead, bar=BAR_MS, note=size),
            Figure("a step, wall clock", _medians([[c.wall_ms for c in r] for r in rounds]), "ms"),
        ),
    )


def _figure(
    name: str, rounds: Sequence[Sequence[Cost]], mode: ForwardMode | None = None, **more: Any
) -> Figure:
    """Return the processor time of the steps, or of those of one kind."""
    times = [[cost.cpu_ms for cost in costs if mode in (None, cost.mode)] for costs in rounds]
    return Figure(name, _medians(times), "ms", **more)


def _medians(rounds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.median(times) for times in rounds if times)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Schedule and commit, without a model.", repeat=4).parse_args(argv)
    return publish(measure(args.repeat))


if __name__ == "__main__":
    sys.exit(main())
