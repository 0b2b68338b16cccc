"""Host time of a decode step: the real engine, scheduler, pipeline and sinks, without a model.

    turn = schedule │ execute: inputs, sampling, rest │ commit │ launched │ hook │ deliver and rest

A replayed forward computes nothing here and attention only gets its page lists, so that the rest is
the Python code of a step, without the GPU driver's time per copy and launch. Rows stay the same
(decode), or streams of 210 tokens, 4.2 s of speech, end and are replaced continuously (streams);
a forward that is too large to be captured is not counted in its step. The hook is the audio
worker's turn without pending blocks. Times are the engine thread's processor time.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.scheduler import tuned_gc
from benchmarks.shapes import Shape, llama
from decoder import CodecSpec, StreamingOptions
from llm import Engine, EngineStoppedError, Request, SamplingParams
from llm.attention.base import AttentionBackend, CapturedShape, PlanMemory
from llm.attention.page_lists import PageLists, list_words, write_page_lists
from llm.batch import ForwardBatch, KVCacheInputs
from llm.memory.staging import Section
from llm.models.llama import LlamaModel
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.runner.device_stream import ImmediateStream
from llm.runner.graphs.capture import CapturedWork, GraphCapture
from llm.sampling.device.records import RECORD_WORDS
from llm.sampling.device.sampler import BufferedSampler, DevicePlan, DeviceSampler
from llm.scheduler import Scheduler
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig
from tts.engine.client import SpeechJob
from tts.engine.decode_loop import DecodeLoop
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream
from tts.families.base import SpeechVocabulary

ROWS = (1, 16, 256, 600)
STEPS = 200  # measured in one repetition
WARM_UP_STEPS = 20
PROMPT_LEN = 100
STREAM_TOKENS = 210  # 4.2 s at 50 tokens/s
PAGE_SIZE = 128
MAX_LENGTH = 2048
EMPTY = Shape(
    "empty", llama(hidden=16, inner=16, layers=1, heads=2, kv_heads=1, head_dim=8, vocab=128)
)
FIRST_CODE, NUM_CODES = 0, 64
PHASES = ("schedule", "inputs", "sampling", "execute", "commit", "launched", "hook")
WHOLE = "turn"
REST = "deliver and rest"
APART = "apart"  # time outside of turns

T = TypeVar("T")


class Phases:
    """Processor time of the thread by phase, ns; nested phases are not counted twice."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, int] = defaultdict(int)
        self._inner = 0

    def watch(self, owner: Any, method: str, phase: str) -> None:
        """Count each call of an object's method as part of a phase."""
        setattr(owner, method, self._timed(getattr(owner, method), phase))

    def _timed(self, function: Callable[..., T], phase: str) -> Callable[..., T]:
        def run(*args: Any, **kwargs: Any) -> T:
            outer, self._inner = self._inner, 0
            started = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time_ns() - started
                self.spent[phase] += spent - self._inner
                self._inner = outer + spent

        return run


class EmptyModel(LlamaModel):
    """A model without layers between the embedding and the head."""

    def hidden_states(self, batch: ForwardBatch, cache: KVCacheInputs) -> Tensor:
        return torch.zeros(len(batch.input_ids), EMPTY.values["hidden_size"])


@dataclass(frozen=True, slots=True)
class Lists:
    """Buffers for the page lists of a captured shape."""

    shape: CapturedShape | None = None
    tables: Section | None = None


class ListsOnly(AttentionBackend[Lists]):
    """Backend that writes page tables as paged kernels read them, without kernels."""

    name = "lists"
    can_capture = can_capture_prompts = True

    def plan(self, batch: ForwardBatch) -> Lists:
        PageLists.of(batch, 0, len(batch.query_lens))
        return Lists()

    def table_words(self, shape: CapturedShape, max_context: int) -> int:
        return list_words(shape.num_rows, -(-max_context // self.pool.page_size))

    def forward(self, plan: Lists, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        return query.flatten(1)

    def capture_plan(
        self, shape: CapturedShape, max_context: int, memory: PlanMemory | None = None
    ) -> Lists:
        assert memory is not None
        return Lists(shape, memory.tables)

    def replan(self, plan: Lists, batch: ForwardBatch) -> None:
        shape, num_rows = plan.shape, len(batch.query_lens)
        assert shape is not None
        assert plan.tables is not None
        first = shape.first_token(batch.num_singles)
        after = shape.num_rows - first - num_rows
        write_page_lists(batch, (0, num_rows), plan.tables.take, before=first, after=after)


class NothingCaptured(GraphCapture):
    """Capture without a replay: tokens keep their values."""

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        return self

    def replay(self) -> None:
        """See `CapturedWork`."""

    def reset(self) -> None:
        """See `CapturedWork`."""


class HostOnlySampler(BufferedSampler):
    """Sampling without the draw: each row gets token 0, which is a code."""

    def sample(self, logits: Tensor, plan: DevicePlan, states: Tensor | None = None) -> Tensor:
        self.load(plan, np.empty((len(logits), RECORD_WORDS), dtype=np.int32))
        return torch.zeros(len(logits), dtype=torch.int32)


class EagerStream(ImmediateStream):
    """Stream that reports to be asynchronous, so that steps are planned ahead."""

    is_asynchronous = True


class Turns:
    """Hook of the engine: calls the audio worker, and records the time of each turn."""

    poll_s = 0.0

    def __init__(self, worker: DecodeLoop, phases: Phases, refill: Callable[[], None]) -> None:
        self._worker = worker
        self._phases = phases
        self._refill = refill
        self._last_ns = 0
        self._left = 0
        self._done = threading.Event()
        self.turns: list[dict[str, float]] = []

    def measure(self, steps: int) -> list[dict[str, float]]:
        """Return the microseconds by phase of so many turns from now on."""
        self.turns, self._left = [], steps
        self._done.clear()
        if not self._done.wait(600):
            raise RuntimeError("the engine takes no steps")
        return self.turns

    def may_wait(self, num_live: int, has_step: bool) -> bool:
        return self._worker.may_wait(num_live, has_step)

    def while_waiting(self, is_done: Callable[[], bool]) -> None:
        self._worker.while_waiting(is_done)

    def after_step(self, num_tokens: int, /) -> bool:
        self._refill()
        self._worker.after_step(num_tokens)
        if self._left:
            spent = self._phases.spent
            total = time.thread_time_ns() - self._last_ns - spent.pop(APART, 0)
            turn = {name: spent[name] / 1e3 for name in PHASES}
            self.turns.append(turn | {REST: total / 1e3 - sum(turn.values()), WHOLE: total / 1e3})
            self._left -= 1
            if not self._left:
                self._done.set()
        self._phases.spent.clear()
        self._last_ns = time.thread_time_ns()
        return False

    def on_stop(self) -> None:
        self._worker.on_stop()


@dataclass(frozen=True, slots=True)
class Kind:
    """A load: `num_tokens` of each request, None for no end."""

    name: str
    num_tokens: int | None


DECODE, STREAMS = Kind("decode", None), Kind("streams", STREAM_TOKENS)


class Streams:
    """Speech tasks on an engine, `rows` at a time; a task that ends is replaced."""

    def __init__(self, engine: Engine, worker: DecodeLoop, kind: Kind, rows: int) -> None:
        self._engine, self._worker, self._kind, self._rows = engine, worker, kind, rows
        self._numbers = itertools.count()
        self._alive: list[SpeechStream] = []
        vocabulary = SpeechVocabulary([range(FIRST_CODE, NUM_CODES)], NUM_CODES, NUM_CODES + 1)
        self._constrain = vocabulary.constrain
        spec = CodecSpec("none", 16_000, Fraction(320), codebook_size=NUM_CODES)
        self._setup = SpeechSetup(spec, vocabulary, MAX_LENGTH)
        self._loop = asyncio.new_event_loop()

    def refill(self) -> None:
        """Replace the streams that have ended."""
        for task in self._alive:
            if not task.is_generating:
                task.is_abandoned = True  # its blocks must not be rendered
                self._worker.remove(task)
        self._alive = [task for task in self._alive if task.is_generating]
        with suppress(EngineStoppedError):
            while len(self._alive) < self._rows:
                self._add()

    def _add(self) -> None:
        number = next(self._numbers)
        prompt = tuple(number * 7 % 100 + index % 20 for index in range(PROMPT_LEN))
        length = self._kind.num_tokens
        if length is None:
            length = MAX_LENGTH - PROMPT_LEN
        elif number < self._rows:  # different lengths, so that they do not all end at once
            length = 1 + (number + 1) * (length - 1) // self._rows
        sampling = self._constrain(
            SamplingParams(temperature=0.8, top_k=50, seed=number, max_tokens=length)
        )
        request = Request(f"stream-{number:08}", prompt, sampling)
        job = SpeechJob(request, StreamingOptions(chunk_sizes=None))
        task = self._loop.run_until_complete(self._task(job))
        self._alive.append(task)
        self._worker.add(task)
        sink = partial(self._worker.on_tokens, task)
        self._engine.submit(request, sink, buffer=task.buffer)

    def close(self) -> None:
        """Close the event loop of the queues."""
        self._loop.close()

    async def _task(self, job: SpeechJob) -> SpeechStream:
        return SpeechStream(job, self._setup, StreamQueue(8))


@contextmanager
def load(kind: Kind, rows: int) -> Iterator[Turns]:
    """Run an engine with so many rows, and measure its turns."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline, scheduler = create(EMPTY.write(Path(folder)), rows)
    engine = Engine(pipeline, scheduler)
    phases = Phases()
    worker = DecodeLoop(engine, None)
    streams = Streams(engine, worker, kind, rows)
    streams.refill()
    phases.watch(streams, "refill", APART)
    watch(phases, pipeline, scheduler, worker)
    turns = Turns(worker, phases, streams.refill)
    engine.set_hook(turns)
    engine.start()
    try:
        yield turns
    finally:
        engine.shutdown()
        streams.close()


def create(model: Path, rows: int) -> tuple[OverlapTextGenerationPipeline, Scheduler]:
    """Create a pipeline as on a GPU: captured decoding, sampling in one program, planning ahead."""
    pages = 1 + rows * -(-MAX_LENGTH // PAGE_SIZE)
    config = AudioGenerationConfig(
        audio_decoder=AUTO_DECODER,
        run_model_test_mode=True,
        max_batch_size=rows,
        max_length=MAX_LENGTH,
        model={
            "model_path": str(model),
            "device_specs": ["cpu"],
            "kv_cache": {"num_pages": pages, "kv_cache_page_size": PAGE_SIZE},
        },
    )
    pipeline = OverlapTextGenerationPipeline(config, EmptyModel, stream=EagerStream())
    runner = pipeline.runner
    backend = runner.attn_backend
    assert backend is not None
    runner.attn_backend = ListsOnly(backend.pool, backend.options)
    runner.token_sampler = HostOnlySampler(DeviceSampler(runner.vocab_size, runner.device, rows))
    runner.use_graphs(NothingCaptured())
    scheduler = Scheduler(config, pipeline.kv_manager, max_seq_len=MAX_LENGTH, plan_ahead=True)
    return pipeline, scheduler


def watch(
    phases: Phases,
    pipeline: OverlapTextGenerationPipeline,
    scheduler: Scheduler,
    worker: DecodeLoop,
) -> None:
    """Measure the parts of a turn."""
    runner = pipeline.runner
    for name in ("schedule", "commit", "launched"):
        phases.watch(scheduler, name, name)
    phases.watch(pipeline, "execute", "execute")
    phases.watch(runner, "prepare", "inputs")
    phases.watch(runner.token_sampler, "prepare", "sampling")
    phases.watch(runner.token_sampler, "load", "sampling")
    phases.watch(runner.loaded_model, "execute", APART)
    phases.watch(worker, "after_step", "hook")


def measure(repeat: int, rows: Sequence[int] = ROWS, steps: int = STEPS) -> Report:
    """Measure both loads at each number of rows, `repeat` times over `steps` turns."""
    figures = []
    torch.set_num_threads(1)
    for kind, num_rows in itertools.product((DECODE, STREAMS), rows):
        with load(kind, num_rows) as turns, tuned_gc():
            turns.measure(WARM_UP_STEPS)
            rounds = [turns.measure(steps) for _ in range(repeat)]
        figures.append(_figure(f"{kind.name}, {num_rows} rows", rounds))
    return Report("host", tuple(figures))


def _figure(name: str, rounds: Sequence[Sequence[dict[str, float]]]) -> Figure:
    """Return the mean turn of each round, with its parts as the note."""
    turns = [turn for turns in rounds for turn in turns]
    shares = {phase: statistics.mean(t[phase] for t in turns) for phase in (*PHASES, REST)}
    note = ", ".join(f"{phase} {share:.0f}" for phase, share in shares.items())
    totals = tuple(statistics.mean(turn[WHOLE] for turn in turns) for turns in rounds)
    return Figure(name, totals, "µs", note=note)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("The host's part of a step.", repeat=3, has_model=False)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="streams at once")
    args = parser.parse_args(argv)
    return publish(measure(args.repeat, args.rows))


if __name__ == "__main__":
    sys.exit(main())
