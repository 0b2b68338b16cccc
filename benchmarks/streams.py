"""Cost of streams in the engine's process without the language model: from codes to readers.

    engine's thread: codes ─▶ tasks │ audio worker's turn: launch, deliver ─▶ queues
    event loop:                       queues ─▶ engine server ─▶ ZeroMQ ─▶ processes that read

Both threads share one interpreter, so that their time delays the language model's steps.
The parts are those of a server on a GPU, with a stub engine that gives each stream
one code every 20 ms, and a codec with padding that replays empty graphs: the time of a GPU's
driver for launches and copies is not included. Streams have the chunks of XCodec2 and 210 codes
each; a stream that ends is replaced by another one, which is part of the event loop's time.
Times are processor time of each thread.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.block_readers import NUM_CODES, PROMPT_LEN, block_readers
from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.scheduler import tuned_gc
from decoder import AudioEncoding, CodecSpec, DecoderOptions
from decoder.codecs.xcodec2.decoder import RECOMMENDED
from decoder.cuda.padded_graphs import PaddedGraphs
from decoder.registry import GPU_MAX_BATCH
from decoder.window_inputs import PaddedNetwork, PaddedRows
from llm import Engine, EngineStats, FinishReason, Request, TokenBuffer, TokenChunk
from llm.engine.types import Sink, StepHook
from llm.sequence import ReceivedPrompt
from llm.stats import SequenceCounters
from tts.engine.client import EngineInfo
from tts.engine.local_client import LocalEngineClient
from tts.families.base import SpeechVocabulary
from tts.ipc.endpoints import reserved
from tts.ipc.engine_server import EngineServer

STREAMS = (300, 600)
READERS = 4  # processes
STEP_S = 0.02  # 50 codes per second and stream
SPAN_S = 4.0  # measured in one repetition
WARM_UP_S = NUM_CODES * STEP_S + 1.0  # until all first, shorter streams have ended
CODEBOOK = 65_536
SPEC = CodecSpec("none", 16_000, Fraction(320), CODEBOOK, recommended=RECOMMENDED)


class Silence(PaddedNetwork):
    """A codec with padding that computes nothing: 16-bit samples, as on a GPU."""

    def __init__(self) -> None:
        self.spec, self.options = SPEC, DecoderOptions(max_batch=GPU_MAX_BATCH)

    def render(self, rows: PaddedRows) -> Tensor:
        """See PaddedNetwork.render."""
        return torch.zeros((len(rows.codes), rows.shape.num_samples), dtype=torch.int16)


def recorded(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Return a capture without a replay; see `decoder.cuda.graphs.GraphRecorder`."""
    return lambda: None, work()


def silence() -> PaddedGraphs:
    """Create the decoder as on a GPU, with captured calls."""
    graphs = PaddedGraphs(Silence(), recorded)
    graphs.capture_schedule(RECOMMENDED)
    graphs.device = "parallel"
    return graphs


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals since the start; processor times of the engine's thread in ns."""

    num_codes: int = 0
    take_ns: int = 0  # its tasks take codes
    turn_ns: int = 0  # the audio worker's turns
    thread_ns: int = 0  # the whole thread
    num_late: int = 0  # steps that were not finished when the next one was due


@dataclass(slots=True)
class Row:
    """A running request."""

    request_id: str
    sink: Sink
    max_codes: int
    buffer: TokenBuffer
    num_codes: int = 0

    def step(self) -> TokenChunk | None:
        """Generate the next code; return those that wait no longer."""
        self.num_codes += 1
        self.buffer.ids.append((37 * self.num_codes + self.max_codes) % CODEBOOK)
        reason = FinishReason.LENGTH if self.num_codes == self.max_codes else None
        waits = 1 < self.num_codes < self.max_codes and len(self.buffer.ids) < self.buffer.limit
        if waits:
            return None
        return TokenChunk(
            self.request_id,
            self.buffer.take(),
            (),
            reason,
            prompt_tokens=PROMPT_LEN,
            output_tokens=self.num_codes,
            queue_s=0.001,
            prefill_s=0.01,
            total_s=STEP_S * self.num_codes,
        )


class StubEngine:
    """The part of `Engine` that `LocalEngineClient` and the audio worker use."""

    def __init__(self) -> None:
        self._hook: StepHook | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, Row] = {}
        self._paused: set[str] = set()
        self._cancelled: set[str] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.totals = Totals()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def set_hook(self, hook: StepHook) -> None:
        self._hook = hook

    def start(self) -> None:
        self._thread.start()

    def submit(
        self,
        request: Request,
        sink: Sink,
        arrival_s: float | None = None,
        *,
        received: ReceivedPrompt | None = None,
        buffer: TokenBuffer | None = None,
    ) -> None:
        with self._lock:
            codes = TokenBuffer() if buffer is None else buffer
            row = Row(request.request_id, sink, request.sampling.max_tokens or 1, codes)
            self._rows[request.request_id] = row

    def cancel(self, request_id: str) -> None:
        with self._lock:
            self._cancelled.add(request_id)

    def pause(self, request_id: str) -> None:
        self._paused.add(request_id)

    def resume(self, request_id: str) -> None:
        self._paused.discard(request_id)

    def wake(self) -> None:
        """Do nothing: it never sleeps for longer than a step."""

    def shutdown(self, timeout_s: float | None = None) -> bool:
        self._is_stopping = True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self) -> EngineStats:
        figures = SequenceCounters().snapshot()
        return EngineStats(len(self._rows), *(0,) * 16, batches=(), sequences=figures)

    def _run(self) -> None:
        assert self._hook is not None
        next_s = time.monotonic()
        while not self._is_stopping:
            chunks, num_codes = self._chunks()
            began_ns = time.thread_time_ns()
            for sink, chunk in chunks:
                sink(chunk)
            taken_ns = time.thread_time_ns()
            self._hook.after_step(1)
            ended_ns, former = time.thread_time_ns(), self.totals
            next_s += STEP_S
            self.totals = Totals(
                former.num_codes + num_codes,
                former.take_ns + taken_ns - began_ns,
                former.turn_ns + ended_ns - taken_ns,
                ended_ns,
                former.num_late + (time.monotonic() > next_s),
            )
            time.sleep(max(0.0, next_s - time.monotonic()))
        self._hook.on_stop()

    def _chunks(self) -> tuple[list[tuple[Sink, TokenChunk]], int]:
        """Return the chunks of one step, and the number of its codes."""
        with self._lock:
            ending, self._cancelled = self._cancelled, set()
            rows = list(self._rows.values())
        running = [row for row in rows if row.request_id not in self._paused]
        chunks = [(row.sink, chunk) for row in running if (chunk := row.step()) is not None]
        gone = [self._rows[request_id] for request_id in ending & self._rows.keys()]
        chunks += [(row.sink, _cancelled(row)) for row in gone]
        for _, chunk in chunks:
            if chunk.finish_reason is not None:
                self._rows.pop(chunk.request_id, None)
        return chunks, len(running)


def _cancelled(row: Row) -> TokenChunk:
    return TokenChunk(row.request_id, finish_reason=FinishReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class Moment:
    """Totals at one time; processor times in ns."""

    engine: Totals
    num_blocks: int
    num_calls: int
    loop_ns: int
    process_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """Differences between two times; processor times in µs."""

    code_us: float  # per code, the engine's thread
    block_us: float  # per block, the engine's thread
    loop_us: float  # per block, the event loop
    other_us: float  # per block, all other threads
    blocks_per_s: float
    blocks_per_call: float
    num_late: int

    @classmethod
    def between(cls, start: Moment, end: Moment, seconds: float) -> Span:
        """Compute the differences. Raises RuntimeError when there was no block."""
        blocks = end.num_blocks - start.num_blocks
        if not blocks:
            raise RuntimeError("no streams are read")
        before, after = start.engine, end.engine
        loop_ns = end.loop_ns - start.loop_ns
        threads_ns = loop_ns + after.thread_ns - before.thread_ns
        return cls(
            (after.take_ns - before.take_ns) / (after.num_codes - before.num_codes) / 1e3,
            (after.turn_ns - before.turn_ns) / blocks / 1e3,
            loop_ns / blocks / 1e3,
            (end.process_ns - start.process_ns - threads_ns) / blocks / 1e3,
            blocks / seconds,
            blocks / (end.num_calls - start.num_calls),
            after.num_late - before.num_late,
        )


class Subject:
    """An engine's process with running streams."""

    def __init__(self, engine: StubEngine, client: LocalEngineClient) -> None:
        self._engine, self._client = engine, client

    async def watch(self, span_s: float) -> Span:
        """Measure for so many seconds."""
        start, started_s = await self._moment(), time.monotonic()
        await asyncio.sleep(span_s)
        return Span.between(start, await self._moment(), time.monotonic() - started_s)

    async def _moment(self) -> Moment:
        audio = (await self._client.status()).audio
        assert audio is not None
        return Moment(
            self._engine.totals,
            round(audio.blocks.total),
            audio.blocks.count,
            time.thread_time_ns(),
            time.process_time_ns(),
        )


async def watch(
    streams: int, readers: int, repeat: int, warm_up_s: float, span_s: float
) -> list[Span]:
    """Measure so many streams for so many spans."""
    vocabulary = SpeechVocabulary([range(CODEBOOK)], CODEBOOK, CODEBOOK + 1)
    engine = StubEngine()
    client = LocalEngineClient(cast(Engine, engine), silence(), vocabulary)
    facts = EngineInfo(client.codec, max_seq_len=4096, raw_encoding=AudioEncoding.PCM_S16LE)
    with tempfile.TemporaryDirectory() as folder:
        base = f"ipc://{Path(folder) / 'hop'}"
        with reserved(base) as endpoints:
            server = EngineServer(client, facts, endpoints)
            try:
                await server.start()
                with block_readers(endpoints, base, streams, readers), tuned_gc():
                    while server.num_streams < streams:
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(warm_up_s)
                    subject = Subject(engine, client)
                    return [await subject.watch(span_s) for _ in range(repeat)]
            finally:
                await server.close()
                await client.close()


def measure(
    repeat: int,
    streams: Sequence[int] = STREAMS,
    readers: int = READERS,
    warm_up_s: float = WARM_UP_S,
    span_s: float = SPAN_S,
) -> Report:
    """Measure each number of streams, `repeat` times over `span_s`."""
    figures: list[Figure] = []
    torch.set_num_threads(1)
    for count in streams:
        spans = asyncio.run(watch(count, readers, repeat, warm_up_s, span_s))
        figures += _figures(f"{count} streams", spans)
    return Report("streams", tuple(figures))


def _figures(name: str, spans: Sequence[Span]) -> list[Figure]:
    last = spans[-1]
    note = f"{last.blocks_per_s:.0f}/s, {last.blocks_per_call:.1f} of a call"
    if late := sum(span.num_late for span in spans):
        note += f"; {late} steps were late"
    return [
        Figure(f"{name}: a code, engine's thread", tuple(s.code_us for s in spans), "µs"),
        Figure(
            f"{name}: a block, engine's thread", tuple(s.block_us for s in spans), "µs", note=note
        ),
        Figure(f"{name}: a block, event loop", tuple(s.loop_us for s in spans), "µs"),
        Figure(f"{name}: a block, other threads", tuple(s.other_us for s in spans), "µs"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("What streams cost the engine's process.", repeat=3, has_model=False)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="at once")
    parser.add_argument("--readers", type=int, default=READERS, help="processes that read")
    args = parser.parse_args(argv)
    return publish(measure(args.repeat, args.streams, args.readers))


if __name__ == "__main__":
    sys.exit(main())
