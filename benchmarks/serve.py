"""A server under an open-loop load: time to first audio, underruns, maximum number of streams.

The server is `python -m tts.serve` in its own processes, the clients are others (an open loop:
benchmarks.listeners), over gRPC on loopback. `--shape` selects a model (speech_shapes).

    gaps      idle time of the device between two steps, prompts or not, in a trace of some of
              them while the first step's clients play; the trace slows them down
    alone     one client after the other: the first sound of an idle server, and its parts by the
              timings of the response
    rate      so many calls per second (--rate), whatever plays: their first sounds
    streams   the maximum that play at once, on average, with 99 of 100 first sounds within 200 ms,
              without stalls and errors: the number is doubled, then bisected
    cancel    half of the first step's clients cancel at their first audio: time until their
              pages are free, as counted by the engine

Playing at once is the rate of arrivals times the mean length. The first seconds of a step are not
counted. `--replicas N` measures a server with N engines, each on a GPU of its own, or on `--gpus`
in all. Server flags come after `--`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch

from benchmarks import trace
from benchmarks.client_pool import ClientPool, client_pool
from benchmarks.listeners import Plan, StreamResult
from benchmarks.report import Figure, Report, arguments, publish, until_interrupted
from benchmarks.server_metrics import Samples, busiest, device_busy, free_port, processor_s, scrape
from benchmarks.speech_shapes import SPEAKERS, Speaker
from llm.batch import ForwardMode
from tests.speech_server import serving
from tts.v1 import speech_pb2, speech_pb2_grpc

LIMIT_MS = 200.0  # of the 99th percentile of first sounds
PARTS = ("gaps", "alone", "rate", "streams", "cancel")
DEFAULT = ("alone", "streams", "cancel")
LEAVING = 0.5  # share of clients that leave at their first audio, where cancelling is measured
CANCEL_BAR_MS = 5.0  # in addition to one batch of the model
MANY = 4096  # maximum number of calls of the server: the engine is the limit
ALONE_WARM_UP = 3
TRACE_AFTER = 2000  # steps of a server: by then the number of streams is stable
TRACE_TRIES = 3  # maximum number of runs of the first step to get a trace

FIRST_PARTS: Mapping[str, Callable[[StreamResult], float]] = {
    "the engine's queue": lambda one: one.queue_s,
    "then to the first token": lambda one: one.prefill_s,
    "text, other tokens, block": lambda one: one.server_s - one.queue_s - one.prefill_s,
    "call and messages": lambda one: one.first_s - one.server_s,
}
"""Seconds of the parts of the way to a client's first message, which add up."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of a step."""

    low_s: float = 2.0
    high_s: float = 6.4
    warm_up_s: float = 3.0
    step_s: float = 8.0  # counted, after the warm-up
    start: int = 32  # number of streams of the first step
    most: int = 2048
    # relative distance of the numbers that hold and do not hold, where the search ends
    closeness: float = 0.1
    alone: int = 20  # number of clients, one after the other
    rate: float = 20.0  # calls per second
    seeds: int = 1  # number of seeds that the result is tried with
    num_gpus: int = 1  # of the server

    @property
    def mean_s(self) -> float:
        return (self.low_s + self.high_s) / 2


@dataclass(frozen=True, slots=True)
class Step:
    """Results at one number of streams. Streams that began during the warm-up are left out."""

    streams: int
    results: tuple[StreamResult, ...]
    seconds: float  # until the last client had received everything
    counted: Samples = field(default_factory=Samples)  # by the server meanwhile
    device_busy: tuple[float, ...] = ()  # percent, by the driver
    processes: Sequence[Sequence[float]] = ()  # of the server, see `busiest`

    def first_ms(self, percent: int) -> float:
        """Return a percentile of the time to the first sound."""
        return percentile([1000 * one.audible_s for one in self.results], percent)

    @property
    def stalls(self) -> int:
        """Number of streams that stalled."""
        return sum(one.stalls > 0 for one in self.results)

    @property
    def errors(self) -> int:
        return sum(bool(one.error) for one in self.results)

    @property
    def holds(self) -> bool:
        """Whether all streams met the requirements of the search."""
        return (
            bool(self.results)
            and not self.stalls
            and not self.errors
            and self.first_ms(99) <= LIMIT_MS
        )

    @property
    def outcome(self) -> str:
        """Short description of the result."""
        missed = f"{self.stalls} stalled, {self.errors} errors, p99 {self.first_ms(99):.0f} ms"
        return f"{self.streams} ({'held' if self.holds else missed})"

    def __str__(self) -> str:
        firsts = "/".join(f"{self.first_ms(percent):.0f}" for percent in (50, 95, 99))
        return (
            f"{self.streams} streams: {len(self.results)} finished, p50/p95/p99 {firsts} ms, "
            f"{self.stalls} stalled{self._how_stalled()}, {self.errors} errors: "
            f"{'holds' if self.holds else 'too many'}"
        )

    def _how_stalled(self) -> str:
        stalled = [one for one in self.results if one.first_stall is not None]
        if not stalled:
            return ""
        seconds = statistics.median(one.stalled_s for one in stalled)
        first = statistics.median_low(one.first_stall or 0 for one in stalled)
        return f" ({1000 * seconds:.0f} ms each, first at message {first}; medians)"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile: the value of a single one, infinity of none."""
    if len(values) < 2:
        return values[0] if values else math.inf
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Stage:
    """A running server, its clients, and the parameters of a step."""

    client_pool: ClientPool
    metrics_port: int
    setup: Setup
    code_rate: float
    multiple: int  # codes: every length is a multiple of the codec's blocks
    trace_file: Path  # trace file of the server
    pids: tuple[int, ...] = ()  # of the server

    def plan(self, seed: int, rate: float = 0.0, count: int = 0, leaving: float = 0.0) -> Plan:
        """Return a plan with a rate, or with so many clients one after the other; a share of them
        leaves early.
        """
        setup = self.setup
        return Plan(
            rate=rate,
            seconds=setup.warm_up_s + setup.step_s,
            seed=seed,
            low_s=setup.low_s,
            high_s=setup.high_s,
            code_rate=self.code_rate,
            multiple=self.multiple,
            count=count,
            leaving=leaving,
        )

    def step(self, streams: int, seed: int = 0, leaving: float = 0.0) -> Step:
        """Run so many streams at once, on average."""
        rate = streams / self.setup.mean_s
        plan = self.plan(seed=1000 * streams + seed, rate=rate, leaving=leaving)
        before, used = scrape(self.metrics_port), processor_s(self.pids)
        started = time.monotonic()
        with device_busy(self.setup.num_gpus) as busy:
            results = self.client_pool.run_plan(plan)
        seconds = time.monotonic() - started
        processes = busiest(used, processor_s(self.pids), seconds)
        time.sleep(1.0)  # until the engine's last numbers have arrived
        counted = tuple(one for one in results if one.due_s >= self.setup.warm_up_s)
        after = scrape(self.metrics_port) - before
        step = Step(streams, counted, seconds, after, tuple(busy), processes)
        print(f"{step}\n    {'; '.join(load(step))}", file=sys.stderr, flush=True)
        return step


def search(step: Callable[[int], Step], setup: Setup) -> list[Step]:
    """Search for the maximum; return all steps: doubled while they hold, then bisected."""
    tried: list[Step] = []
    good, bad, streams = 0, setup.most + 1, setup.start
    while streams <= setup.most and bad - good > max(1, setup.closeness * good):
        tried.append(step(streams))
        if tried[-1].holds:
            good = streams
        else:
            bad = streams
        streams = min(2 * good, setup.most) if bad > setup.most else (good + bad) // 2
        if streams in (good, bad):
            break
    return tried


def gaps(stage: Stage, speaker: Speaker) -> Iterator[Figure]:
    """Measure gaps in the trace that the server writes after enough steps."""
    for _ in range(TRACE_TRIES):
        stage.step(stage.setup.start)
        if stage.trace_file.exists():
            break
    else:
        raise RuntimeError("too few steps for a trace: lower --profiling.trace-after, behind --")
    found = trace.device_times(trace.read(stage.trace_file))
    name = f"{speaker.name}, {stage.setup.start} streams"
    between = "audio decoding and waits for listeners between them"
    note = f"of {found.num_steps} steps, at most {max(found.gaps):.0f}; {between}"
    yield Figure(f"{name}: between two steps", (found.gap,), "us", note=note)
    yield Figure(f"{name}: device busy in the trace", (100 * found.busy_share,), "%")


def alone(stage: Stage, speaker: Speaker) -> Iterator[Figure]:
    """Measure clients one after the other; the first few warm up."""
    stage.client_pool.run_in_one(stage.plan(seed=1, count=ALONE_WARM_UP))
    results = stage.client_pool.run_in_one(stage.plan(seed=2, count=stage.setup.alone))
    firsts = tuple(1000 * one.audible_s for one in results)
    tails = ", ".join(f"p{p} {percentile(firsts, p):.1f} ms" for p in (95, 99))
    errors = sum(bool(one.error) for one in results)
    received = percentile([1000 * one.first_s for one in results], 50)
    yield Figure(
        f"{speaker.name}: first sound, alone",
        firsts,
        "ms",
        speaker.first_audio_bar_ms if torch.cuda.is_available() else None,
        note=f"{tails}, first message p50 {received:.1f} ms; "
        f"{mean([one.prompt_tokens for one in results]):.0f} tokens of prompt, "
        f"{errors} errors, {sum(one.stalls for one in results)} stalls",
    )
    for part, seconds in FIRST_PARTS.items():
        values = tuple(1000 * seconds(one) for one in results)
        yield Figure(f"{speaker.name}: first message, alone: {part}", values, "ms")


def rate(stage: Stage, speaker: Speaker) -> Iterator[Figure]:
    """Measure the first sounds of so many calls per second."""
    step = stage.step(round(stage.setup.rate * stage.setup.mean_s))
    bars = {95: speaker.rate_bar_ms if torch.cuda.is_available() else None}
    for percent in (50, 95, 99):
        yield Figure(
            f"{speaker.name}, {stage.setup.rate:g} calls/s: first sound, p{percent}",
            (step.first_ms(percent),),
            "ms",
            bars.get(percent),
            note=f"of {len(step.results)} calls, {step.errors} errors, {step.stalls} stalled",
        )


def streams(stage: Stage, speaker: Speaker) -> Iterator[Figure]:
    """Measure the maximum number of streams that hold."""
    setup = stage.setup
    tried = search(stage.step, setup)
    best = max((step for step in tried if step.holds), key=lambda s: s.streams, default=None)
    low, high = setup.low_s, setup.high_s
    yield Figure(
        f"{speaker.name}: real-time streams",
        (best.streams if best else 0,),
        "at once",
        speaker.streams_bar if torch.cuda.is_available() else None,
        at_least=True,
        note=f"open loop, {low:g} to {high:g} s of audio each, {setup.warm_up_s:g} s of warm-up, "
        f"{setup.step_s:g} s counted; tried {', '.join(step.outcome for step in tried)}",
    )
    if best is not None:
        again = [stage.step(best.streams, seed) for seed in range(1, setup.seeds)]
        yield from _result_figures(speaker.name, [best, *again])


def cancel(stage: Stage, speaker: Speaker) -> Iterator[Figure]:
    """Measure clients that leave during a stream."""
    counted = stage.step(stage.setup.start, seed=9, leaving=LEAVING).counted
    batch_ms = 1000 * counted.mean("sonant_batch_execute_seconds")
    most_ms = 1000 * counted.at_most("sonant_cancel_seconds", 99)
    yield Figure(
        f"{speaker.name}, {stage.setup.start} streams: cancel to pages free",
        (1000 * counted.mean("sonant_cancel_seconds"),),
        "ms",
        round(batch_ms + CANCEL_BAR_MS, 1) if torch.cuda.is_available() else None,
        note=f"mean of {counted.total('sonant_cancel_seconds_count'):.0f}, p99 at most "
        f"{most_ms:g} ms; a batch of the model takes {batch_ms:.1f} ms",
    )


def _result_figures(name: str, steps: Sequence[Step]) -> Iterator[Figure]:
    """Return figures with one value for each seed."""
    label = f"{name}, {steps[0].streams} streams"
    for percent in (50, 95, 99):
        values = tuple(step.first_ms(percent) for step in steps)
        yield Figure(f"{label}: first sound, p{percent}", values, "ms")
    stalled = tuple(float(step.stalls) for step in steps)
    results = sum(len(step.results) for step in steps)
    yield Figure(f"{label}: streams that stalled", stalled, "", note=f"of {results} streams")
    audio = [
        step.counted.total("sonant_audio_seconds_total") / seconds
        for step, seconds in _spans(steps)
    ]
    yield Figure(f"{label}: audio", tuple(audio), "s/s", note="sent, from first call to last end")
    yield from _inside(label, steps)


def _spans(steps: Sequence[Step]) -> Iterator[tuple[Step, float]]:
    for step in steps:
        yield step, max(step.seconds, 1e-9)


def _inside(label: str, steps: Sequence[Step]) -> Iterator[Figure]:
    """Return the counts of the server and the driver, with the warm-up."""
    counted = [step.counted for step in steps]
    yield Figure(
        f"{label}: one batch of the model",
        tuple(1000 * samples.mean("sonant_batch_execute_seconds") for samples in counted),
        "ms",
        note=f"{mean([s.mean('sonant_batch_rows') for s in counted]):.0f} rows, mean"
        f"{''.join(by_kind(counted[0]))}",
    )
    yield Figure(
        f"{label}: one call of the audio decoder",
        tuple(1000 * samples.mean("sonant_block_decode_seconds") for samples in counted),
        "ms",
        note=f"{mean([s.mean('sonant_block_batch') for s in counted]):.1f} blocks, mean",
    )
    parts = (("batches of the model", "batch_execute"), ("audio decoder calls", "block_decode"))
    for part, metric in parts:
        shares = tuple(
            100 * step.counted.total(f"sonant_{metric}_seconds_sum") / seconds
            for step, seconds in _spans(steps)
        )
        yield Figure(f"{label}: {part} run", shares, "%", note="of the time; the two overlap")
    busy = [mean(step.device_busy) for step in steps if step.device_busy]
    if busy:
        yield Figure(f"{label}: device busy", tuple(busy), "%", note="by the driver")
    used = [step.processes[0][0] for step in steps if step.processes]
    if used:
        yield Figure(f"{label}: busiest process", tuple(used), "%", note=_processes(steps[0]))


def load(step: Step) -> Iterator[str]:
    """Iterate over what the server's parts did in a step, for a search whose step may not hold."""
    counted, seconds = step.counted, max(step.seconds, 1e-9)
    num_steps = counted.total("sonant_batch_rows_count")
    yield (
        f"{num_steps / seconds:.0f} batches/s of {counted.mean('sonant_batch_rows'):.0f} rows"
        f"{''.join(by_kind(counted)).replace(';', ',')}"
    )
    apart_ms = (
        1000 * (seconds - counted.total("sonant_batch_execute_seconds_sum")) / max(num_steps, 1)
    )
    gap_ms = 1000 * counted.mean("sonant_inter_token_seconds")
    late_ms = 1000 * counted.at_most("sonant_inter_token_seconds", 99)
    plan_ms = 1000 * counted.mean("sonant_batch_schedule_seconds")
    yield (
        f"{apart_ms:.2f} ms between two, {plan_ms:.2f} of them to plan; "
        f"a token after {gap_ms:.1f} ms, p99 at most {late_ms:g}"
    )
    yield (
        f"{counted.total('sonant_block_decode_seconds_count') / seconds:.0f} decoder calls/s of "
        f"{counted.mean('sonant_block_batch'):.1f} blocks, "
        f"{1000 * counted.mean('sonant_block_decode_seconds'):.1f} ms each"
    )
    shares = (
        f"{100 * counted.total(f'sonant_{name}_seconds_sum') / seconds:.0f} %"
        for name in ("batch_execute", "block_decode")
    )
    yield f"batches {' and calls '.join(shares)} of the time, device {mean(step.device_busy):.0f} %"
    if step.processes:
        yield _processes(step)


def _processes(step: Step) -> str:
    """Return the processor time of the server's busiest processes and of their busiest threads."""
    shown = (
        f"{process[0]:.0f} ({' + '.join(f'{share:.0f}' for share in process[1:4])})"
        for process in step.processes[:3]
    )
    return f"processes of the server, % of a core and of its threads: {', '.join(shown)}"


def by_kind(counted: Samples) -> Iterator[str]:
    """Iterate over the means of each kind of batch."""
    for mode in ForwardMode:
        rows, took = (
            counted.mean(f"sonant_batch_{name}", mode=mode.value)
            for name in ("rows", "execute_seconds")
        )
        if rows:
            yield f"; {mode.value} {1000 * took:.2g} ms with {rows:.0f}"


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 of none."""
    return statistics.fmean(values) if values else 0.0


@contextmanager
def staged(
    speaker: Speaker,
    setup: Setup,
    clients: int,
    flags: Sequence[str],
    *,
    has_trace: bool = False,
    profile: Path | None = None,
) -> Iterator[Stage]:
    """Start a server of a shape, with client processes; `profile`: folder that keeps its trace."""
    port = free_port()
    own = ["--prometheus-metrics-mode", "launch_multiproc_server", "--metrics-port", str(port)]
    for limit in ("concurrent-requests", "queued-requests", "streams-per-client"):
        own += [f"--max-{limit}", str(MANY)]
    with tempfile.TemporaryDirectory() as folder:
        trace_file = (profile or Path(folder)) / f"serve-{speaker.name}.json"
        if has_trace:
            trace_file.unlink(missing_ok=True)
            own += ["--profiling.gpu-profiling", "on", "--profiling.trace-file", str(trace_file)]
            own += ["--profiling.trace-after", str(TRACE_AFTER)]
        own += speaker.flags(Path(folder))
        with serving(flags=[*own, *flags]) as server, client_pool(server.address, clients) as pool:
            code_rate, multiple = codes(server.address)
            yield Stage(pool, port, setup, code_rate, multiple, trace_file, server.pids)


def codes(address: str) -> tuple[float, int]:
    """Return codes per second of the server's voice, and the common divisor of its blocks."""
    with grpc.insecure_channel(address) as channel:
        stub = speech_pb2_grpc.SpeechServiceStub(channel)
        (model,) = stub.GetServerInfo(speech_pb2.GetServerInfoRequest()).models
    return model.speech_tokens_per_second, math.gcd(*model.default_chunking.chunk_sizes)


def parser() -> argparse.ArgumentParser:
    """The command line, without the server's flags."""
    own = Setup()
    options = arguments("A server under random arrivals.", repeat=own.seeds, has_model=False)
    options.add_argument("--shape", choices=SPEAKERS, default="voice")
    options.add_argument("--part", nargs="+", choices=PARTS, default=list(DEFAULT))
    options.add_argument("--profile", type=Path, help="folder in which the trace of gaps is kept")
    options.add_argument("--replicas", type=int, default=1, help="engines")
    options.add_argument("--gpus", type=int, help="of all engines (default: one each)")
    options.add_argument("--clients", type=int, default=4, help="processes of listeners")
    options.add_argument("--lengths", type=float, nargs=2, default=(own.low_s, own.high_s))
    options.add_argument("--warm-up-s", type=float, default=own.warm_up_s)
    options.add_argument("--step-s", type=float, default=own.step_s)
    options.add_argument("--start", type=int, default=own.start, help="streams of the first step")
    options.add_argument("--most", type=int, default=own.most, help="streams of the last one")
    options.add_argument("--closeness", type=float, default=own.closeness)
    options.add_argument("--alone", type=int, default=own.alone, help="listeners in turn")
    options.add_argument("--rate", type=float, default=own.rate, help="calls per second")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    args, flags = parser().parse_args(given[:split]), given[split + 1 :]
    num_gpus = args.gpus or args.replicas
    setup = Setup(
        low_s=args.lengths[0],
        high_s=args.lengths[1],
        warm_up_s=args.warm_up_s,
        step_s=args.step_s,
        start=args.start,
        most=args.most,
        closeness=args.closeness,
        alone=args.alone,
        rate=args.rate,
        seeds=args.repeat,
        num_gpus=num_gpus,
    )
    speaker = SPEAKERS[args.shape].on_gpus(num_gpus)
    if args.replicas > 1:
        flags = ["--replicas", str(args.replicas), *flags]
    if torch.cuda.is_available():
        devices = ",".join(f"cuda:{number}" for number in range(num_gpus))
        flags = ["--model.device-specs", devices, *flags]
    parts = {"gaps": gaps, "alone": alone, "rate": rate, "streams": streams, "cancel": cancel}
    wanted = sorted(args.part, key=PARTS.index)  # a trace is of a server's first steps
    tracing = {"has_trace": "gaps" in args.part, "profile": args.profile}
    with staged(speaker, setup, args.clients, flags, **tracing) as stage:
        measured = (figure for part in wanted for figure in parts[part](stage, speaker))
        figures = list(until_interrupted(measured))
    return publish(Report("serve", tuple(figures)))


if __name__ == "__main__":
    sys.exit(main())
