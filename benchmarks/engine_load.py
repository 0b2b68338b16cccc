"""An engine on a model of random weights, and in-process loads."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.shapes import Shape
from llm import Engine, Request, SamplingParams, StepHook, TokenChunk, create_engine
from llm.pipeline.base import TextGenerationPipelineInterface
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig

MAX_LENGTH = 2304  # tokens of one sequence: large enough for the longest job of the throughput test
TEXT_IDS = 10_000  # ids in prompts of the throughput test are below this one
THROUGHPUT_TEMPERATURE = 0.6
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt and the number of tokens to generate; temperature 0 takes the likeliest ones."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    temperature: float = 0.0

    def request(self) -> Request:
        """Return a request with a new id that only ends at its length."""
        sampling = SamplingParams(
            temperature=self.temperature,
            seed=self.num_tokens,
            max_tokens=self.num_tokens,
            ignore_eos=True,
        )
        return Request(f"job-{next(_numbers)}", self.prompt_ids, sampling)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of some jobs."""

    num_tokens: int
    wall_s: float  # from before the first submission to the last token
    decode_tokens_per_s: float  # of the tokens after the first chunk
    is_whole: bool  # whether the time limit was not reached

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


class Load:
    """Jobs that run on an engine, and their sink."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        """Submit all jobs."""
        self._engine = engine
        self._ended = threading.Event()
        self._num_left = len(jobs)
        self._num_tokens = self._first_tokens = 0
        self._first_s = self._last_s = 0.0
        self._error = ""
        requests = [job.request() for job in jobs]
        self.ids = [request.request_id for request in requests]
        self._started_s = time.perf_counter()
        for request in requests:
            engine.submit(request, self._take)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens so far."""
        return self._num_tokens

    @property
    def has_ended(self) -> bool:
        """Whether some job has ended."""
        return self._num_left < len(self.ids)

    def _take(self, chunk: TokenChunk) -> None:
        if chunk.token_ids:
            self._last_s = time.perf_counter()
            self._num_tokens += len(chunk.token_ids)
            if not self._first_s:
                self._first_s, self._first_tokens = self._last_s, self._num_tokens
        if chunk.finish_reason is not None:
            self._error = self._error or chunk.error
            self._num_left -= 1
            if not self._num_left:
                self._ended.set()

    def wait(self, limit_s: float | None = None) -> Run:
        """Wait until the last job ends, or the time limit. Raises `RuntimeError` when a job
        failed.
        """
        is_whole = self._ended.wait(limit_s)
        num_tokens, last_s = self._num_tokens, self._last_s
        if self._error:
            raise RuntimeError(self._error)
        decode_s = max(last_s - self._first_s, 1e-9)
        rate = (num_tokens - self._first_tokens) / decode_s
        return Run(num_tokens, last_s - self._started_s, rate, is_whole)

    def wait_until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait until a condition holds. Raises `RuntimeError` after the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline or self._ended.is_set():
                raise RuntimeError("the load never got there")
            time.sleep(0.002)

    def step_us(self, seconds: float) -> float:
        """Return the mean duration of a step over so many seconds in which all jobs decode."""
        tokens, started_s = self._num_tokens, time.perf_counter()
        time.sleep(seconds)
        steps = (self._num_tokens - tokens) / len(self.ids)
        return 1e6 * (time.perf_counter() - started_s) / max(steps, 1)

    def stop(self) -> None:
        """Cancel running jobs, and wait for their ends."""
        for request_id in self.ids:
            self._engine.cancel(request_id)
        if not self._ended.wait(60.0):
            raise RuntimeError("cancelled requests do not end")


@contextmanager
def running(
    shape: Shape, folder: Path, values: Mapping[str, Any], hook: StepHook | None = None
) -> Iterator[Engine]:
    """Start an engine on a shape; see `created`."""
    engine = created(shape, folder, values)
    engine.set_hook(hook)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
        pipeline_of(engine).shutdown()
        release_memory()


def created(shape: Shape, folder: Path, values: Mapping[str, Any]) -> Engine:
    """Create an engine on a shape; `values` are configuration that overrides the defaults here."""
    own: dict[str, Any] = {
        "audio_decoder": AUTO_DECODER,
        "run_model_test_mode": shape.checkpoint is None,
        "max_length": MAX_LENGTH,
        "profiling": {"gpu_profiling": "on"},  # so that a trace shows where steps begin
        "model": {"model_path": str(shape.write(folder))},
    }
    config = AudioGenerationConfig(**AudioGenerationConfig.merged(own, values))
    engine = create_engine(config)
    release_memory()  # memory from the creation of random weights
    return engine


def release_memory() -> None:
    """Free unused cached memory of torch on the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pipeline_of(engine: Engine) -> TextGenerationPipelineInterface:
    """Return the pipeline with its model; use the device on the engine's thread only."""
    pipeline = engine.pipeline
    assert isinstance(pipeline, TextGenerationPipelineInterface)
    return pipeline


def run(engine: Engine, jobs: Sequence[Job], limit_s: float | None = None) -> Run:
    """Run jobs to their ends, or to a time limit."""
    load = Load(engine, jobs)
    try:
        return load.wait(limit_s)
    finally:
        load.stop()


def decode_jobs(count: int, vocab_size: int, prompt_len: int, num_tokens: int) -> list[Job]:
    """Return greedy jobs of one length, each with its own prompt."""
    random = Random(0)
    return [
        Job(tuple(random.randrange(vocab_size) for _ in range(prompt_len)), num_tokens)
        for _ in range(count)
    ]


def throughput_jobs(count: int, vocab_size: int, lengths: tuple[int, int]) -> list[Job]:
    """Return jobs with prompts and outputs of lengths in [low, high], both included.

    256 jobs of 100 to 1,024 are those of nano-vllm's bench.py, number for number
    (https://github.com/GeeeekExplorer/nano-vllm): 133,966 tokens of output.
    """
    random = Random(0)
    prompts = [
        tuple(random.randint(0, TEXT_IDS) % vocab_size for _ in range(random.randint(*lengths)))
        for _ in range(count)
    ]
    return [Job(prompt, random.randint(*lengths), THROUGHPUT_TEMPERATURE) for prompt in prompts]
