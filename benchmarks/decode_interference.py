"""Slowdown of the language model's steps by concurrent audio decoding.

Sequences decode on a real engine; on its thread, between the steps, codec calls are launched
and collected as in a server (`tts.engine.decode_loop`), with full batches of blocks from the middle
of streams:

    paced      after each call the decoder pauses as `DecodePacer` prescribes, as in
               a server whose clients all have buffered audio
    without    calls without pauses

The slowdown is that of the mean over all steps, with or without a concurrent call: each
yields one token per sequence. On a GPU the next step is planned while one runs, as in a server.
On a CPU a step waits for a call.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.codec_calls import kinds_of
from benchmarks.engine_load import Job, Load, decode_jobs, pipeline_of, run, running
from benchmarks.report import Figure, Report, arguments, publish, until_interrupted
from benchmarks.shapes import LLASA_1B, ORPHEUS_3B, TOY, Shape
from decoder import DecodeRequest, DecodeResult, Renderer, create_decoder, with_graphs
from llm import Engine
from tts.config.flags import add_config_flags
from tts.config.pipeline import AudioGenerationConfig
from tts.config.sources import flag_values
from tts.engine.pacer import REST

BAR = 5.0  # percent
PAIRS: Mapping[str, tuple[Shape, str]] = {
    "a": (LLASA_1B, "xcodec2"),
    "b": (ORPHEUS_3B, "snac"),
    "toy": (TOY, "ramp"),
}
PROMPT = 100  # tokens
SPAN_S = 1.5
SETTLE_S = 0.2
PILOT_TOKENS = 64  # tokens of each sequence, to measure their speed
MARGIN = 2.0  # factor of tokens over the measured time, so that no sequence ends early


class DecodeInterferenceHook:
    """Hook of the engine that keeps the decoder busy."""

    poll_s = 0.0

    def __init__(self, renderer: Renderer, batch: Sequence[DecodeRequest]) -> None:
        self._renderer, self._batch = renderer, batch
        self._rendered: DecodeResult | None = None
        self._next_s = 0.0
        self.rest: float | None = None  # multiple of the duration of a call; None: no calls
        self.num_calls = 0
        self.calls_s = 0.0

    @property
    def batch_size(self) -> int:
        """Number of blocks of one call."""
        return len(self._batch)

    def after_step(self, num_tokens: int, /) -> bool:
        """Launch or collect a call; never requests another turn at once."""
        now_s = time.perf_counter()
        if self._rendered is not None and self._rendered.is_ready:
            took_s = self._rendered.took_s
            self._rendered.samples()
            self._rendered = None
            self._next_s = now_s + (self.rest or 0.0) * took_s
            self.num_calls += 1
            self.calls_s += took_s
        if self.rest is not None and self._rendered is None and now_s >= self._next_s:
            self._rendered = self._renderer.launch(self._batch)
        return False

    def may_wait(self, num_live: int, has_step: bool) -> bool:
        """Never: steps and calls run side by side."""
        return False

    def while_waiting(self, is_done: Callable[[], bool]) -> None:
        """Do nothing: calls are launched after steps."""

    def on_stop(self) -> None:
        """Do nothing when the engine stops."""


@dataclass(frozen=True, slots=True)
class Span:
    """Measurements of a period."""

    step_ms: float
    call_ms: float
    call_share: float  # share of the time


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine with its hook, and its sequences."""

    engine: Engine
    hook: DecodeInterferenceHook
    jobs: Sequence[Job]

    def watch(self, rest: float | None) -> Span:
        """Run the sequences again with calls of this pace; None: without calls.

        Raises `RuntimeError` when not all of them ran during the whole period.
        """
        hook, rows = self.hook, len(self.jobs)
        load = Load(self.engine, self.jobs)
        try:
            load.wait_until(lambda: self.engine.stats().decoding == rows)
            hook.rest = rest
            time.sleep(SETTLE_S)
            tokens, calls, calls_s = load.num_tokens, hook.num_calls, hook.calls_s
            preemptions, started_s = self.engine.stats().preemptions, time.perf_counter()
            time.sleep(SPAN_S)
            steps = (load.num_tokens - tokens) / rows
            seconds = time.perf_counter() - started_s
            calls, calls_s = hook.num_calls - calls, hook.calls_s - calls_s
            if load.has_ended:
                raise RuntimeError("a sequence ended while it was measured: raise --max-length")
            if self.engine.stats().preemptions > preemptions:
                raise RuntimeError("not all sequences have room: fewer --rows")
        finally:
            hook.rest = None
            load.stop()
        return Span(
            1000 * seconds / max(steps, 1), 1000 * calls_s / max(calls, 1), calls_s / seconds
        )


def lasting_jobs(engine: Engine, count: int) -> list[Job]:
    """Return sequences that run longer than the measurement, within the maximum length."""
    vocab_size = pipeline_of(engine).vocab_size
    pilot = run(engine, decode_jobs(count, vocab_size, PROMPT, PILOT_TOKENS))
    steps = (SETTLE_S + SPAN_S) * pilot.decode_tokens_per_s / count
    most = pipeline_of(engine).max_seq_len - PROMPT
    num_tokens = min(PILOT_TOKENS + math.ceil(MARGIN * steps), most)
    return decode_jobs(count, vocab_size, PROMPT, num_tokens)


def compare(subject: Subject, name: str, repeat: int) -> Iterator[Figure]:
    """Compare runs without calls, with paced calls, and with calls without pauses."""
    paces = {"alone": None, f"calls at rest {REST:g}": REST, "calls without rest": 0.0}
    spans = {way: list[Span]() for way in paces}
    for _ in range(repeat):
        for way, rest in paces.items():
            spans[way].append(subject.watch(rest))
    alone = spans.pop("alone")
    yield Figure(f"{name}: step, alone", tuple(span.step_ms for span in alone), "ms")
    for way, beside in spans.items():
        delays = (
            100 * (span.step_ms / without.step_ms - 1)
            for span, without in zip(beside, alone, strict=True)
        )
        call_ms = statistics.fmean(span.call_ms for span in beside)
        share = statistics.fmean(100 * span.call_share for span in beside)
        blocks = subject.hook.batch_size
        note = f"a call of {blocks} blocks takes {call_ms:.1f} ms, {share:.0f} % of the time"
        bar = BAR if paces[way] and torch.cuda.is_available() else None
        yield Figure(f"{name}: step later, {way}", tuple(delays), "%", bar, note=note)


def measure(
    pair: str, rows: Sequence[int], repeat: int, values: Mapping[str, Any]
) -> Iterator[Figure]:
    """Measure one language model and its codec, with each number of sequences."""
    shape, codec = PAIRS[pair]
    device = values["model"]["device_specs"][0]
    plain = create_decoder(codec, test_mode=True, device=device)
    options = plain.spec.recommended
    (window,) = kinds_of(plain, options)["full"]
    decoder = with_graphs(plain, options) if device.startswith("cuda") else plain
    batch = [DecodeRequest(window, as_s16=True) for _ in range(decoder.options.max_batch)]
    hook = DecodeInterferenceHook(Renderer(decoder), batch)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(shape, Path(folder), values, hook) as engine,
    ):
        for number in rows:
            subject = Subject(engine, hook, lasting_jobs(engine, number))
            yield from compare(subject, f"{pair}, {number} rows", repeat)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(
        "Slowdown of steps by concurrent audio decoding.", repeat=3, has_model=False
    )
    options.add_argument("--shape", nargs="+", choices=tuple(PAIRS), default=["a", "b"])
    options.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    options.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    add_config_flags(options, AudioGenerationConfig)
    args = options.parse_args(argv)
    own: dict[str, Any] = {"model": {"device_specs": [args.device]}}
    if args.device.startswith("cuda"):
        own["enable_overlap_scheduler"] = True
    values = AudioGenerationConfig.merged(own, flag_values(args, AudioGenerationConfig))
    figures = (
        figure for pair in args.shape for figure in measure(pair, args.rows, args.repeat, values)
    )
    return publish(Report("decode_interference", tuple(until_interrupted(figures))))


if __name__ == "__main__":
    sys.exit(main())
