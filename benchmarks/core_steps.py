"""The steps of the core: their duration by the number of rows, their kernels, and the gaps between
them (parts `steps` and `gaps` of `benchmarks.core`).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import sub
from pathlib import Path

from benchmarks import trace
from benchmarks.core_subject import Subject, warm_jobs
from benchmarks.engine_load import Job, Load, decode_jobs, pipeline_of
from benchmarks.report import Figure
from llm import EngineStats
from llm.batch import ForwardMode
from llm.models.profiling import set_up_profiler

GAP_BAR_US = 60.0
BUSY_BARS = {1: 90.0, 256: 95.0}  # percent, by rows
UNTRACED_S = 0.1
PROFILED_LENGTH = 1024  # maximum length of sequences in a trace
WATCH_S = 0.02  # between two snapshots of the counters of steps
NUM_BANDS = 8  # of the number of rows of a step
NUM_KERNELS = 8  # that are named, those with most time
WITH_PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of some kinds between two snapshots; sizes are means."""

    count: int  # of those that have ended
    seconds: float
    rows: float
    tokens: float
    context: float  # tokens in the KV cache

    @classmethod
    def between(cls, then: EngineStats, now: EngineStats, *modes: ForwardMode) -> Batches:
        """Compute the differences."""
        past, current = (
            [kind for kind in stats.batches if kind.mode in modes] for stats in (then, now)
        )

        def grown(name: str) -> tuple[int, float]:
            old, new = ([getattr(kind, name) for kind in kinds] for kinds in (past, current))
            counts = (sum(one.count for one in found) for found in (new, old))
            totals = (sum(one.total for one in found) for found in (new, old))
            return sub(*counts), sub(*totals)

        count, seconds = grown("execute_s")
        sizes = (grown(name) for name in ("rows", "input_tokens", "context_tokens"))
        return cls(count, seconds, *(total / max(planned, 1) for planned, total in sizes))


def time_by_kind(name: str, then: EngineStats, now: EngineStats, wall_s: float) -> Iterator[Figure]:
    """Divide the time of a run: steps with prompts, steps without, and what the host does between
    two steps, which with overlap is while the device computes.
    """
    prompts = Batches.between(then, now, *WITH_PROMPTS)
    decode = Batches.between(then, now, ForwardMode.DECODE)
    planned_s = sum(kind.schedule_s.total for kind in now.batches)
    planned_s -= sum(kind.schedule_s.total for kind in then.batches)
    captured = ""
    if now.graphs is not None and then.graphs is not None:
        replays = now.graphs.prompt_replays - then.graphs.prompt_replays
        captured = f", {replays} of them captured"
    yield Figure(
        f"{name}: steps with prompts, in all",
        (prompts.seconds,),
        "s",
        note=f"{prompts.count} steps of {prompts.tokens:.0f} tokens{captured}",
    )
    yield Figure(
        f"{name}: steps without prompts, in all",
        (decode.seconds,),
        "s",
        note=f"{decode.count} steps of {decode.rows:.0f} rows",
    )
    yield Figure(
        f"{name}: between steps, in all",
        (wall_s - prompts.seconds - decode.seconds,),
        "s",
        note=f"{planned_s:.2f} s of it planning, the rest results and streams",
    )


def steps(subject: Subject) -> Iterator[Figure]:
    """Measure the steps of the throughput test, then the kernels of a step with all its rows."""
    sizes, name = subject.sizes, subject.shape.name
    seen = _watched(subject)
    prompts = Batches.between(seen[0], seen[-1], *WITH_PROMPTS)
    yield Figure(
        f"{name}: step with prompts",
        (1000 * prompts.seconds / max(prompts.count, 1),),
        "ms",
        note=f"{prompts.count} steps of {prompts.tokens:.0f} tokens, "
        f"{1000 * prompts.seconds:.0f} ms in all; means",
    )
    width = max(sizes.requests // NUM_BANDS, 1)
    bands = defaultdict[int, list[Batches]](list)
    for then, now in pairwise(seen):
        found = Batches.between(then, now, ForwardMode.DECODE)
        if found.count and found.rows:
            bands[(math.ceil(found.rows) - 1) // width].append(found)
    for band, parts in sorted(bands.items(), reverse=True):
        count = sum(part.count for part in parts)
        yield Figure(
            f"{name}: step, {width * band + 1} to {width * (band + 1)} rows",
            (1000 * sum(part.seconds for part in parts) / count,),
            "ms",
            note=f"{count} steps, mean",
        )
    yield from _kernels(subject)


def _watched(subject: Subject) -> list[EngineStats]:
    """Run the throughput test; return snapshots from before it to its end or the time limit."""
    engine, jobs = subject.engine, [_with_other_prompt(job) for job in warm_jobs(subject)]
    seen, deadline = [engine.stats()], time.monotonic() + subject.sizes.limit_s
    load = Load(engine, jobs)
    try:
        while not load.wait(WATCH_S).is_whole and time.monotonic() < deadline:
            seen.append(engine.stats())
    finally:
        load.stop()
    return [*seen, engine.stats()]


def _with_other_prompt(job: Job) -> Job:
    """Return a job of the same lengths: keys and values of its own prompt may be kept."""
    return replace(job, prompt_ids=job.prompt_ids[::-1])


def _kernels(subject: Subject) -> Iterator[Figure]:
    """Profile full decode steps behind prompts of a mean length; no figures on a CPU."""
    sizes, runner = subject.sizes, pipeline_of(subject.engine).runner
    found = _traced(subject, sizes.requests, sum(sizes.lengths) // 2)
    kv_bytes = found.batches.context * subject.shape.kv_values * runner.kv_cache_dtype.itemsize
    label = f"{subject.shape.name}, {sizes.requests} rows"
    return kernel_figures(label, found.times.kernels, f"{kv_bytes / 1e9:.1f} GB of keys and values")


def kernel_figures(label: str, kernels: Sequence[trace.KernelTime], reads: str) -> Iterator[Figure]:
    """Iterate over all kernels of a step together, then those with most time."""
    if kernels:
        count, seconds = (sum(getattr(k, name) for k in kernels) for name in ("count", "us"))
        note = f"{count:.0f} with {reads}, under the profiler"
        yield Figure(f"{label}: kernels of a step", (seconds,), "us", note=note)
    for kernel in kernels[:NUM_KERNELS]:
        note = f"{kernel.count:.3g} of a step"
        yield Figure(f"{label}: {kernel.name}", (kernel.us,), "us", note=note)


@dataclass(frozen=True, slots=True)
class Traced:
    """Decoding under the profiler."""

    times: trace.DeviceTimes
    batches: Batches


@contextmanager
def _decoding(subject: Subject, rows: int, prompt_len: int) -> Iterator[Load]:
    """Decode so many rows while the block runs."""
    engine = subject.engine
    length = min(PROFILED_LENGTH, pipeline_of(engine).max_seq_len - prompt_len)
    load = Load(engine, decode_jobs(rows, subject.vocab_size, prompt_len, length))
    try:
        load.wait_until(lambda: engine.stats().decoding == rows)
        yield load
    finally:
        load.stop()


def _traced(subject: Subject, rows: int, prompt_len: int, path: Path | None = None) -> Traced:
    """Profile the decoding of so many rows; `path`: where the trace is kept."""
    engine = subject.engine
    set_up_profiler()  # the sequences might end meanwhile
    with _decoding(subject, rows, prompt_len):
        before = engine.stats()
        times = trace.device_times(trace.record(engine, subject.sizes.trace_s, path))
        batches = Batches.between(before, engine.stats(), ForwardMode.DECODE)
    return Traced(times, batches)


def gaps(subject: Subject) -> Iterator[Figure]:
    """Profile decoding of one row, and of as many rows as the throughput test has.

    Steps are timed before the first trace: after one, the profiler still slows launches down.
    """
    prompt_len, untraced_us = subject.sizes.prompt_len, dict[int, float]()
    for rows in sorted({1, subject.sizes.requests}):
        with _decoding(subject, rows, prompt_len) as load:
            untraced_us[rows] = load.step_us(UNTRACED_S)
    for rows, step_us in untraced_us.items():
        yield from _gaps(subject, rows, step_us)


def _gaps(subject: Subject, rows: int, untraced_us: float) -> Iterator[Figure]:
    path = None
    if subject.trace_folder is not None:
        path = subject.trace_folder / f"{subject.shape.name}-{rows}.json"
    found = _traced(subject, rows, subject.sizes.prompt_len, path).times
    name, is_full = f"{subject.shape.name}, {rows} rows", rows in BUSY_BARS and subject.has_bars
    yield Figure(
        f"{name}: gap between steps",
        (found.gap,),
        "us",
        GAP_BAR_US if is_full else None,
        note=f"of {found.num_steps} steps, at most {max(found.gaps):.0f}; a step takes "
        f"{found.step:.0f} us under the profiler, the device {found.busy_share * found.step:.0f} "
        f"of it; {untraced_us:.0f} without",
    )
    yield Figure(
        f"{name}: device busy",
        (100 * found.busy_share,),
        "%",
        BUSY_BARS[rows] if is_full else None,
        at_least=True,
        note=f"{100 * found.step_share:.1f} % without pauses inside a step, "
        f"{found.kernels_per_step:.0f} kernels each",
    )
