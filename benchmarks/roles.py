"""Steps of decoding streams and first tokens of long prompts: two replicas against two roles.

Two engines on devices of their own have streams that decode all the time, and long prompts that
arrive at a constant rate:

    replicas   each engine has half of the streams and every other prompt
    roles      one engine has all streams; the other one computes the prompts and sends their pages

Each engine is a process with its clients in it, so that nothing is measured but engines. A step is
the time between two tokens of a stream. Its p99 with replicas is that of both together. Of a first
token with roles, `answer` is the time until the other engine has computed and written the prompt,
and `claim` the part of it until the engine that decodes has pages for the prompt.

A step reads the contexts of all streams, so it grows with them. Streams begin again after
`--round-s`: those of speech are not longer than 2,048 tokens.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.engine_load import Job, created, decode_jobs, pipeline_of
from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.shapes import SHAPES
from decoder import AudioEncoding
from llm import PipelineRole, Request, SamplingParams, TokenChunk
from tts.config.flags import add_config_flags
from tts.config.pipeline import AudioGenerationConfig
from tts.config.sources import flag_values
from tts.engine.client import EngineClient, EngineInfo
from tts.engine.local_client import LocalEngineClient
from tts.engine.prefill_client import PrefillClient
from tts.ipc.decode_client import DecodeClient
from tts.ipc.endpoints import Endpoints, reserved
from tts.ipc.engine_server import EngineServer
from tts.processes.collector import tune_gc

STEP_BAR, FIRST_BAR = 0.5, 1.0  # roles against replicas
CONTEXT = 512  # tokens of a stream's prompt
PROMPT_TOKENS = 4  # tokens that each long prompt generates
WARM_UPS = 4  # long prompts that are not counted
NAMES = {
    "steps_ms": "step",
    "first_ms": "first token",
    "claim_ms": "claim",
    "answer_ms": "answer",
}
START_S = 900.0  # time for engines to load and for streams to decode


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one engine. `prompts`: the numbers of the long prompts that it gets."""

    shape: str
    values: dict[str, Any]
    streams: int
    prompts: range
    prompt_len: int
    interval_s: float  # between two prompts of all engines
    seconds: float
    rounds: int
    base: str = ""  # of the engine that computes the prompts; empty: it is this one


@dataclass(slots=True)
class Times:
    """Measured times, in milliseconds."""

    steps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    claim_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)

    @classmethod
    def merged(cls, found: Sequence[Times]) -> Times:
        """Return the times of several engines together."""
        return cls(**{name: [ms for each in found for ms in getattr(each, name)] for name in NAMES})


class TimedClient(DecodeClient):
    """Client that notes where the time of a first token goes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.times = Times()

    async def _claim(self, *arguments: Any) -> None:
        started_s = time.perf_counter()
        await super()._claim(*arguments)
        self.times.claim_ms.append(1000 * (time.perf_counter() - started_s))

    async def _receive_from(self, *arguments: Any) -> None:
        started_s = time.perf_counter()
        await super()._receive_from(*arguments)
        self.times.answer_ms.append(1000 * (time.perf_counter() - started_s))


def client_of(plan: Plan, role: PipelineRole) -> LocalEngineClient:
    """Create and start the plan's engine."""
    own: dict[str, Any] = {"pipeline_role": role}
    if role is PipelineRole.DecodeOnly:
        own["prefill_endpoints"] = [plan.base]
    values = AudioGenerationConfig.merged(plan.values, own)
    with tempfile.TemporaryDirectory() as folder:
        return LocalEngineClient(created(SHAPES[plan.shape], Path(folder), values))


def prompt_of(number: int, plan: Plan, vocab_size: int) -> Request:
    """Return a long prompt of its own from the first token on."""
    random = Random(f"prompt {number}")  # of a number it would ignore the sign
    ids = tuple(random.randrange(vocab_size) for _ in range(plan.prompt_len))
    sampling = SamplingParams(temperature=0.0, max_tokens=PROMPT_TOKENS, ignore_eos=True)
    return Request(f"prompt-{number}", ids, sampling)


class Streams:
    """Streams that decode until they are cancelled, and the times of one's tokens."""

    def __init__(self, client: LocalEngineClient, jobs: Sequence[Job]) -> None:
        self._engine = client.engine
        self.times_s: list[float] = []
        requests = [job.request() for job in jobs]
        self._ids = [request.request_id for request in requests]
        self._ended = 0
        for request in requests:
            is_watched = request is requests[0]
            self._engine.submit(request, self._watch if is_watched else self._take)

    def _watch(self, chunk: TokenChunk) -> None:
        self.times_s.append(time.perf_counter())
        self._take(chunk)

    def _take(self, chunk: TokenChunk) -> None:
        self._ended += chunk.finish_reason is not None

    async def all_decode(self) -> None:
        """Wait until all of them decode. Raises `RuntimeError` when some have ended."""
        deadline_s = time.monotonic() + START_S
        while self._engine.stats().decoding < len(self._ids):
            if self._ended or time.monotonic() > deadline_s:
                raise RuntimeError("not all streams decode: fewer --streams")
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Cancel the streams. Raises `RuntimeError` when one had ended before."""
        ended = self._ended
        for request_id in self._ids:
            self._engine.cancel(request_id)
        while self._ended < len(self._ids):
            await asyncio.sleep(0.01)
        if ended:
            raise RuntimeError("a stream ended while it was measured: raise --max-length")


async def first_ms(client: EngineClient, request: Request) -> float:
    """Run a request; return the milliseconds until its first token. Raises `RuntimeError`."""
    started_s, first_s = time.perf_counter(), None
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            if chunk.error:
                raise RuntimeError(chunk.error)
            if chunk.token_ids:
                first_s = first_s or time.perf_counter()
    if first_s is None:
        raise RuntimeError(f"{request.request_id} has no token")
    return 1000 * (first_s - started_s)


async def warm_up(client: EngineClient, plan: Plan, vocab_size: int) -> None:
    """Run prompts that are not measured."""
    for number in range(WARM_UPS):
        numbers = -1 - number - plan.prompts.start * WARM_UPS
        await first_ms(client, prompt_of(numbers, plan, vocab_size))


async def measured(
    client: EngineClient, plan: Plan, vocab_size: int, streams: Streams, number: int
) -> Times:
    """Send the prompts of round `number` while the streams decode."""
    times = Times()
    if isinstance(client, TimedClient):
        client.times = times
    size = -(-len(plan.prompts) // plan.rounds)
    chosen = plan.prompts[number * size : (number + 1) * size]
    requests = [prompt_of(each, plan, vocab_size) for each in chosen]
    first, started_s, running = len(streams.times_s), time.perf_counter(), []
    for each, request in zip(chosen, requests, strict=True):
        due_s = started_s + (each - number * size * plan.prompts.step) * plan.interval_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        running.append(asyncio.create_task(first_ms(client, request)))
    await asyncio.sleep(max(0.0, started_s + plan.seconds / plan.rounds - time.perf_counter()))
    times.first_ms = list(await asyncio.gather(*running))
    times.steps_ms = (1000 * np.diff(np.array(streams.times_s[first:]))).tolist()
    return times


async def _decode(plan: Plan, ready: Event, go: Event) -> Times:
    role = PipelineRole.DecodeOnly if plan.base else PipelineRole.PrefillAndDecode
    local = client_of(plan, role)
    client: EngineClient = local
    try:
        if plan.base:
            client = await TimedClient.connect(local, [plan.base])
        pipeline = pipeline_of(local.engine)
        jobs = decode_jobs(plan.streams, pipeline.vocab_size, CONTEXT, pipeline.max_seq_len)
        tune_gc()
        ready.set()
        await asyncio.to_thread(go.wait, START_S)
        found: list[Times] = []
        for number in range(plan.rounds):
            streams = Streams(local, jobs)
            await streams.all_decode()
            if not number:
                await warm_up(client, plan, pipeline.vocab_size)
            found.append(await measured(client, plan, pipeline.vocab_size, streams, number))
            await streams.stop()
        stats = local.engine.stats()
        if plan.base and not stats.pages_received:
            raise RuntimeError("no pages were received")
        if stats.preemptions:
            raise RuntimeError("not all streams have room: fewer --streams")
        return Times.merged(found)
    finally:
        await client.close()


def decode(plan: Plan, ready: Event, go: Event, results: Queue[Times | str]) -> None:
    """Run a plan in this process; put its times, or an error, into `results`."""
    try:
        results.put(asyncio.run(_decode(plan, ready, go)))
    except Exception as error:
        results.put(repr(error))
        ready.set()


async def _prefill(plan: Plan, ready: Event, done: Event) -> None:
    client = PrefillClient(client_of(plan, PipelineRole.PrefillOnly))
    with reserved(plan.base) as own:
        await client.warm_up()
        tune_gc()
        info = EngineInfo(None, 0, AudioEncoding.PCM_S16LE)
        server = EngineServer(client, info, Endpoints.of(own.base, client.page_format))
        await server.start()
        ready.set()
        await asyncio.to_thread(done.wait)
        await server.close()
    await client.close()


def prefill(plan: Plan, ready: Event, done: Event) -> None:
    """Compute prompts in this process until `done`."""
    asyncio.run(_prefill(plan, ready, done))


def run_plans(plans: Sequence[Plan], prefill_plan: Plan | None) -> Times:
    """Run engines with their plans at the same time, each in a process; return all times."""
    context = multiprocessing.get_context("spawn")
    go, done, results = context.Event(), context.Event(), context.Queue()
    processes = []
    if prefill_plan is not None:
        serves = context.Event()
        processes.append(context.Process(target=prefill, args=(prefill_plan, serves, done)))
        processes[0].start()
        while not serves.wait(1.0):
            if not processes[0].is_alive():
                raise RuntimeError("the engine for prompts has failed")
    ready = [context.Event() for _ in plans]
    for plan, event in zip(plans, ready, strict=True):
        processes.append(context.Process(target=decode, args=(plan, event, go, results)))
        processes[-1].start()
    try:
        for event in ready:
            event.wait(START_S)
        go.set()
        found = [results.get(timeout=START_S) for _ in plans]
    finally:
        done.set()
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        raise RuntimeError(errors[0])
    return Times.merged(found)


def figures_of(name: str, runs: Sequence[Times]) -> list[Figure]:
    """Return the medians and p99 of the times of one arrangement."""
    found = []
    for field_name, what in NAMES.items():
        if not all(getattr(run, field_name) for run in runs):
            continue  # nothing of this kind happens there
        for percent in (50, 99):
            values = tuple(float(np.percentile(getattr(r, field_name), percent)) for r in runs)
            note = f"{sum(len(getattr(r, field_name)) for r in runs)} measured"
            found.append(Figure(f"{name}: {what}, p{percent}", values, "ms", note=note))
    return found


def measure(args: Any, values: dict[str, Any]) -> Report:
    """Measure both arrangements alternately."""
    devices = args.devices.split(",")
    count = round(args.seconds * args.rate)

    def plan(device: str, streams: int, prompts: range, base: str = "") -> Plan:
        own = {"model": {"device_specs": [device]}, "max_batch_size": streams + 64}
        return Plan(
            args.shape,
            AudioGenerationConfig.merged(own, values),
            streams,
            prompts,
            args.prompt,
            1 / args.rate,
            args.seconds,
            max(1, round(args.seconds / args.round_s)),
            base,
        )

    base = f"ipc://{tempfile.gettempdir()}/roles-{time.monotonic_ns():x}"
    halves = [
        plan(device, args.streams // 2, range(n, count, 2)) for n, device in enumerate(devices)
    ]
    decodes = [plan(devices[0], args.streams, range(count), base)]
    prompts = plan(devices[1], 1, range(0), base)
    replicas, roles = [], []
    for _ in range(args.repeat):
        replicas.append(run_plans(halves, None))
        roles.append(run_plans(decodes, prompts))
    figures = [*figures_of("replicas", replicas), *figures_of("roles", roles)]
    by_name = {figure.name: figure.values for figure in figures}
    for what, bar in (("step", STEP_BAR), ("first token", FIRST_BAR)):
        pairs = zip(by_name[f"roles: {what}, p99"], by_name[f"replicas: {what}, p99"], strict=True)
        gain = tuple(own / other for own, other in pairs)
        limit = bar if devices[0] != "cpu" else None
        figures.append(Figure(f"{what}, p99: roles against replicas", gain, "times", limit))
    return Report("roles", tuple(figures))


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Two replicas against two roles.", repeat=3, has_model=False)
    has_gpus = torch.cuda.device_count() > 1
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-1b")
    parser.add_argument("--devices", default="cuda:0,cuda:1" if has_gpus else "cpu,cpu")
    parser.add_argument("--streams", type=int, default=200, help="streams that decode")
    parser.add_argument("--rate", type=float, default=10.0, help="prompts per second")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of a measurement")
    parser.add_argument("--round-s", type=float, default=2.5, help="duration of a stream")
    add_config_flags(parser, AudioGenerationConfig)
    args = parser.parse_args(argv)
    own: dict[str, Any] = {"max_length": 16_384}
    if "cuda" in args.devices:
        own["enable_overlap_scheduler"] = True
    values = AudioGenerationConfig.merged(own, flag_values(args, AudioGenerationConfig))
    return publish(measure(args, values))


if __name__ == "__main__":
    sys.exit(main())
