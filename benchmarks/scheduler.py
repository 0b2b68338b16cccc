"""What the scheduler costs: schedule and commit, with 512 requests running and 2,000 waiting.

The model is left out: each row of a batch is answered with a token at once. Requests end all the
time and the waiting ones take their places, so steps that only decode and steps that admit
prompts are both among the measured ones. Times are of the thread's processor time, which other
programs on the machine change little; the wall-clock median is given beside them.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Figure, Report, arguments, publish
from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.kv_cache.manager import KVCacheManager
from llm.request import Request, SamplingParams
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import Sequence as LiveSequence
from tts.collector import calm_collector

RUNNING = 512
WAITING = 2000
BAR_MS = 1.0
STEPS = 500  # measured in one repetition
PROMPT_LEN = 60
PAGE_SIZE = 128
STOP_ID = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """One step: what it held and what it took."""

    mode: ForwardMode
    cpu_ms: float
    wall_ms: float


class Load:
    """A scheduler kept at `running` rows and `waiting` requests behind them."""

    def __init__(self, running: int, waiting: int) -> None:
        self._waiting = waiting
        self._numbers = itertools.count()
        limits = SchedulerLimits(max_batch_size=running)
        pages = running * 4 + 1
        self.scheduler = Scheduler(limits, KVCacheManager(pages, PAGE_SIZE), max_seq_len=1024)
        self._refill()
        while self.scheduler.num_running < running:
            self.step()

    def _refill(self) -> None:
        missing = self._waiting - self.scheduler.num_waiting
        for number in itertools.islice(self._numbers, max(missing, 0)):
            prompt = tuple(number * 7 % 1000 + index for index in range(PROMPT_LEN))
            length = 120 + number * 37 % 160  # so that requests do not end all at once
            sampling = SamplingParams(max_tokens=length, stop_token_ids=(STOP_ID,))
            self.scheduler.add(LiveSequence(Request(f"request-{number:08}", prompt, sampling)))

    def step(self) -> Cost:
        """One step; the time between schedule and commit is not counted."""
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        batch = self.scheduler.schedule()
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        output = answer(batch)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        self.scheduler.commit(batch, output)
        cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
        self._refill()
        return Cost(batch.mode, cpu / 1e6, wall / 1e6)


@contextmanager
def calm() -> Iterator[None]:
    """Garbage collection as in a process that serves."""
    former = gc.get_threshold()
    calm_collector()
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()


def answer(batch: ScheduledBatch) -> StepOutput:
    """A token, never the stop id, for every row that samples."""
    return StepOutput({row.request_id: (7,) for row in batch.rows if row.samples})


def measure(
    repeat: int, steps: int = STEPS, running: int = RUNNING, waiting: int = WAITING
) -> Report:
    """The cost of a step under a load of so many requests, `repeat` times over `steps` of them."""
    load = Load(running, waiting)
    with calm():
        rounds = [[load.step() for _ in range(steps)] for _ in range(repeat)]

    def figure(name: str, of: Callable[[Sequence[Cost]], Sequence[float]], **more: Any) -> Figure:
        medians = tuple(statistics.median(of(costs)) for costs in rounds if of(costs))
        return Figure(name, medians, "ms", **more)

    return Report(
        "scheduler",
        (
            figure(
                "a step, schedule + commit",
                lambda costs: [cost.cpu_ms for cost in costs],
                bar=BAR_MS,
                note=f"{running} rows, {waiting} wait",
            ),
            figure("of them, only decode", lambda costs: _of(costs, ForwardMode.DECODE)),
            figure("of them, with prompts", lambda costs: _of(costs, ForwardMode.MIXED)),
            figure("a step, wall clock", lambda costs: [cost.wall_ms for cost in costs]),
        ),
    )


def _of(costs: Sequence[Cost], mode: ForwardMode) -> list[float]:
    return [cost.cpu_ms for cost in costs if cost.mode is mode]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Schedule and commit, without a model.", repeat=4).parse_args(argv)
    return publish(measure(args.repeat))


if __name__ == "__main__":
    sys.exit(main())
