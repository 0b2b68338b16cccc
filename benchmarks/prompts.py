"""Cost of a mixed batch as a CUDA graph and without one: on a CUDA device, with random weights of
published sizes.

    host      making the inputs, planning attention and launching everything
    device    from the first kernel to the sampled tokens, when the host is far enough ahead
    step      both, one after the other: the latency of a single request

Decode rows have contexts of one length, scattered over the pool.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Figure, Report, arguments, publish, until_interrupted
from benchmarks.shapes import SHAPES, Shape
from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.request import SamplingParams
from llm.runner.graphs.capture import CudaCapture
from llm.runner.graphs.cuda_graphs import GraphInputs
from llm.runner.model_runner import ModelRunner
from tts.config.flags import add_config_flags
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig
from tts.config.sources import flag_values

DEFAULT_SHAPES = ("llasa-1b", "orpheus-3b")
CONTEXT = 300  # tokens of a decode row
PROMPT = 109
MIXTURES = ((0, 1), (32, 0), (32, 1), (256, 0), (256, 1), (256, 2), (500, 0), (500, 2))
MAX_LENGTH = 2304
AHEAD_CYCLES = 40_000_000  # cycles that the device waits, for the host to get ahead


@dataclass(frozen=True, slots=True)
class Subject:
    """A runner and its batch."""

    runner: ModelRunner
    batch: ScheduledBatch

    def step(self) -> torch.Tensor:
        """Run everything from rows to tokens."""
        runner = self.runner
        with torch.inference_mode():
            inputs = runner.prepare(self.batch)
            rows = [row for row in self.batch.rows if row.samples]
            return runner.step(inputs, runner.token_sampler.prepare(rows))[1]

    def is_replayed(self) -> bool:
        """Whether a graph runs it."""
        with torch.inference_mode():
            return isinstance(self.runner.prepare(self.batch), GraphInputs)


def mixture(runner: ModelRunner, decoding: int, prompts: int) -> ScheduledBatch:
    """Return a batch of both kinds of rows, each with its own pages as far as there are enough."""
    size, total = runner.page_size, runner.max_total_num_tokens // runner.page_size
    made = torch.Generator().manual_seed(0)
    order = (torch.randperm(total - 1, generator=made) + 1).tolist()
    sampling = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True)
    rows, used = [], 0
    for place in range(decoding + prompts):
        is_prompt = place >= decoding
        fed, start = (PROMPT, 0) if is_prompt else (1, CONTEXT)
        count = -(-(start + fed) // size)
        pages = tuple(order[(used + n) % len(order)] for n in range(count))
        used += count
        ids = tuple(7 * (place + n) % runner.vocab_size for n in range(fed))
        rows.append(ScheduledRow(str(place), ids, start, pages, is_prompt, True, sampling))
    mixed = ForwardMode.MIXED if decoding else ForwardMode.EXTEND
    return ScheduledBatch(tuple(rows), mixed if prompts else ForwardMode.DECODE)


def times(subject: Subject, repeat: int) -> Mapping[str, tuple[float, ...]]:
    """Return milliseconds by kind."""
    found: dict[str, list[float]] = {"host": [], "device": [], "step": []}
    for _ in range(3):
        subject.step()
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        subject.step()
        found["host"].append(1000 * (time.perf_counter() - started))
        torch.cuda.synchronize()
        found["step"].append(1000 * (time.perf_counter() - started))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        first.record()
        subject.step()
        last.record()
        last.synchronize()
        found["device"].append(first.elapsed_time(last))
    return {kind: tuple(values) for kind, values in found.items()}


def measure(shape: Shape, values: Mapping[str, Any], repeat: int) -> Iterator[Figure]:
    """Measure one shape."""
    own: dict[str, Any] = {
        "audio_decoder": AUTO_DECODER,
        "run_model_test_mode": True,
        "max_length": MAX_LENGTH,
        "max_batch_size": 512,
    }
    with tempfile.TemporaryDirectory() as folder:
        own["model"] = {"model_path": str(shape.write(Path(folder)))}
        merged = AudioGenerationConfig.merged(own, values)
        planned = ModelRunner(AudioGenerationConfig(**merged)).graph_bytes(own["max_batch_size"])
        eager = AudioGenerationConfig.merged(merged, {"model": {"disable_cuda_graph": True}})
        before = _free_bytes()
        runner = ModelRunner(AudioGenerationConfig(**eager))
        runner.initialize()
        yield from _capture(shape.name, runner, before, planned)
        yield from _compare(shape.name, runner, repeat)
        runner.shutdown()
    gc.collect()
    torch.cuda.empty_cache()


def _capture(name: str, runner: ModelRunner, before: int, planned: int) -> Iterator[Figure]:
    """Capture graphs for the runner; `before` is the free memory without a runner."""
    free, started = _free_bytes(), time.perf_counter()
    runner.use_graphs(CudaCapture(runner.device))
    torch.cuda.synchronize()
    seconds, graphs, plan = time.perf_counter() - started, runner.graph_runner, runner.memory_plan
    assert graphs is not None
    assert plan is not None
    counts = f"{len(graphs.shapes)} shapes, {len(graphs.prompt_shapes)} with prompts"
    yield Figure(f"{name}: captured", (seconds,), "s", note=counts)
    taken = (free - _free_bytes()) / 1e9
    yield Figure(f"{name}: graphs", (taken,), "GB", note=f"{planned / 1e9:.2f} planned")
    beside = before - _free_bytes() - runner.weights_bytes - plan.kv_bytes
    yield Figure(f"{name}: memory besides weights and KV", (beside / 1e9,), "GB")


def _compare(name: str, runner: ModelRunner, repeat: int) -> Iterator[Figure]:
    graphs = runner.graph_runner
    for decoding, prompts in MIXTURES:
        subject = Subject(runner, mixture(runner, decoding, prompts))
        text = f"{name}: {decoding} rows, {prompts} prompts of {PROMPT}"
        for runner.graph_runner in (None, graphs):
            way = "replayed" if subject.is_replayed() else "launch by launch"
            for kind, found in times(subject, repeat).items():
                yield Figure(f"{text}, {way}: {kind}", found, "ms")


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Forwards with prompts.", repeat=20, has_model=False)
    options.add_argument("--shape", nargs="+", choices=SHAPES, default=list(DEFAULT_SHAPES))
    add_config_flags(options, AudioGenerationConfig)
    args = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("graphs are measured on a CUDA device: there is none")
    values = AudioGenerationConfig.merged(
        {"model": {"device_specs": ["cuda:0"]}}, flag_values(args, AudioGenerationConfig)
    )
    figures = (
        figure for name in args.shape for figure in measure(SHAPES[name], values, args.repeat)
    )
    return publish(Report("prompts", tuple(until_interrupted(figures))))


if __name__ == "__main__":
    sys.exit(main())
