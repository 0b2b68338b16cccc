"""Steps of a device in a trace of torch's profiler: gaps between them, kernels, utilisation.

A trace is the JSON that `torch.profiler` writes for chrome://tracing. A kernel belongs to the step
in whose range (`profiling.gpu_profiling` names them) it was launched; prefills and mixed batches
are steps, too. Without kernels, on the CPU, the ranges themselves count as the device's work. The
profiler slows launches down, so that gaps are upper bounds.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from llm import Engine
from llm.batch import ForwardMode
from llm.models.profiling import STEP_RANGES, create_profiler, export

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STEP_NAMES = {f"sonant.{n}" for mode, n in STEP_RANGES.items() if mode is not ForwardMode.IDLE}
MIN_STEPS = 4  # of the engine, in a trace
LIMIT_S = 5.0
Span = tuple[float, float]
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel in a mean step."""

    name: str  # without arguments
    us: float  # all its launches
    count: float  # of launches


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Times of the steps in a trace, in microseconds."""

    num_steps: int
    gaps: tuple[float, ...]  # from the last kernel of a step to the first of the next
    busy_share: float  # of the time from the first step's start to the last one's end
    step_share: float  # the same without the gaps inside a step
    kernels_per_step: float
    step: float  # from the start of one to that of the next, mean
    kernels: tuple[KernelTime, ...] = ()  # the longest first; none on a CPU

    @property
    def gap(self) -> float:
        return statistics.median(self.gaps)


def record(engine: Engine, seconds: float, path: Path | None = None) -> list[Event]:
    """Record the trace events of an engine for so long, or longer for slow steps.

    They are also written to `path`, if given. `set_up_profiler` precedes the first call.
    """
    profiler = create_profiler()
    # Ranges are recorded on the thread that starts the profiler.
    engine.run_on_engine(profiler.start).result()
    last, deadline = engine.stats().steps + MIN_STEPS, time.monotonic() + LIMIT_S
    time.sleep(seconds)
    while engine.stats().steps < last and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.run_on_engine(profiler.stop).result()
    with tempfile.TemporaryDirectory() as folder:
        target = path or Path(folder) / "trace.json"
        export(profiler, target)
        return read(target)


def read(path: Path) -> list[Event]:
    """Read the events of a trace file."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def device_times(events: Iterable[Event]) -> DeviceTimes:
    """Compute the times. Raises `ValueError` when there are fewer than two steps."""
    timed = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(_span(e) for e in timed if _is_step(e))
    work = [event for event in timed if event.get("cat") in ON_DEVICE]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in timed
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    launches = _steps(ranges, work, launched)
    steps = [[_span(e) for e in step] for step in launches] if work else [[r] for r in ranges]
    if len(steps) < 2:
        raise ValueError(f"{len(steps)} steps in the trace")
    spans = [(min(s for s, _ in step), max(e for _, e in step)) for step in steps]
    start, end = spans[0][0], spans[-1][1]
    gaps = tuple(max(b[0] - a[1], 0.0) for a, b in pairwise(spans))
    busy = (
        _covered((_span(event) for event in work), start, end) if work else end - start - sum(gaps)
    )
    return DeviceTimes(
        num_steps=len(steps),
        gaps=gaps,
        busy_share=busy / (end - start),
        step_share=_covered(spans, start, end) / (end - start),
        kernels_per_step=sum(map(len, steps)) / len(steps),
        step=(spans[-1][0] - start) / (len(spans) - 1),
        kernels=_kernels(launches),
    )


def _kernels(steps: Sequence[Sequence[Event]]) -> tuple[KernelTime, ...]:
    spent = defaultdict[str, list[float]](list)
    for event in chain.from_iterable(steps):
        name = str(event["name"]).removeprefix("void ")
        spent[re.split("[<(]", name, maxsplit=1)[0]].append(float(event["dur"]))
    means = (
        KernelTime(name, sum(times) / len(steps), len(times) / len(steps))
        for name, times in spent.items()
    )
    return tuple(sorted(means, key=lambda kernel: -kernel.us))


def _is_step(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event.get("name") in STEP_NAMES


def _span(event: Event) -> Span:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _steps(
    ranges: Sequence[Span], work: Sequence[Event], launched: Mapping[int, float]
) -> list[list[Event]]:
    """Return kernels by the range they were launched in, without empty ranges."""
    starts = [start for start, _ in ranges]
    steps: list[list[Event]] = [[] for _ in ranges]
    for event in work:
        if event["cat"] != "kernel":
            continue
        moment = launched.get(event.get("args", {}).get("correlation"), -1.0)
        place = bisect_right(starts, moment) - 1
        if place >= 0 and moment <= ranges[place][1]:
            steps[place].append(event)
    return [step for step in steps if step]


def _covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the length of the union of spans, inside [start, end]."""
    total, reached = 0.0, start
    for begin, stop in sorted(spans):
        total += max(min(stop, end) - max(begin, reached), 0.0)
        reached = max(reached, min(stop, end))
    return total
