"""Device time of sampling by batch size and kind of row.

    greedy     argmax
    speech     4,096 candidates of the vocabulary, top_p, a repetition penalty (as for Orpheus)
    text       logits with the spread of a trained model, temperature 0.7, top_k 50, top_p 0.9
    nucleus    the same without top_k
    flat       logits so even that most of the vocabulary is in the nucleus

Each figure is a replay of a captured graph that does nothing else. It needs a CUDA device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Figure, Report, arguments, publish
from llm.batch import ScheduledRow
from llm.kernels.registry import PDL_CAPABILITY
from llm.request import SamplingParams
from llm.sampling.device.sampler import DeviceSampler, SamplingBuffers

VOCABULARY = 193_800  # the largest of the speech models
BATCHES = (1, 8, 64, 256)
BARS_US = {1: 60.0, 256: 400.0}
REPLAYS = 20
SPREAD = 3.0  # standard deviation of a trained model's logits, about
TEXT: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "speech": {
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "allowed_ranges": ((160_000, 164_096),),
    },
    "text": {**TEXT, "top_k": 50},
    "nucleus": TEXT,
    "flat": {"temperature": 1.0, "top_p": 0.9},
}


def logits_of(kind: str, num_rows: int) -> Tensor:
    """Return float32 [B, V] on the device, rounded to bfloat16 as by a model's head."""
    made = torch.Generator("cuda").manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCABULARY, generator=made, device="cuda")
    return (logits * (1.0 if kind == "flat" else SPREAD)).bfloat16().float()


def rows_of(kind: str, num_rows: int) -> list[ScheduledRow]:
    return [
        ScheduledRow(
            f"r{n}", (1,), 0, (1,), False, True, SamplingParams(**{**KINDS[kind], "seed": n})
        )
        for n in range(num_rows)
    ]


def replays_us(
    sampler: DeviceSampler, buffers: SamplingBuffers, logits: Tensor, repeat: int
) -> list[float]:
    """Return several measurements of one captured `sample` in microseconds."""
    sampler.sample(logits, buffers)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(logits, buffers)
    graph.replay()
    found = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / REPLAYS)
    return found


def host_us(sampler: DeviceSampler, buffers: SamplingBuffers, kind: str, repeat: int) -> Figure:
    """Measure the host time of a full batch: plan and load."""
    rows, found = rows_of(kind, BATCHES[-1]), []
    for step in range(repeat + 3):
        started = time.perf_counter()
        sampler.load(sampler.prepare(rows, step), buffers)
        found.append(1e6 * (time.perf_counter() - started))
        sampler.sample(logits_of("greedy", BATCHES[-1]), buffers)
        torch.cuda.synchronize()
    return Figure(f"prepare and load, {BATCHES[-1]} rows", tuple(found[3:]), "us of the host")


def measure(repeat: int, kinds: Sequence[str] = tuple(KINDS)) -> Report:
    """Measure every kind at every batch size."""
    figures = []
    level = int(torch.cuda.get_device_capability() >= PDL_CAPABILITY)
    sampler = DeviceSampler(VOCABULARY, torch.device("cuda"), BATCHES[-1], level=level)
    buffers = sampler.create_buffers()
    for kind in kinds:
        for num_rows in BATCHES:
            rows, logits = rows_of(kind, num_rows), logits_of(kind, num_rows)
            sampler.load(sampler.prepare(rows), buffers)
            values = tuple(replays_us(sampler, buffers, logits, repeat))
            spread = statistics.quantiles(values)[2] if repeat > 1 else values[0]
            note = f"upper quartile {spread:.1f}"
            bar = BARS_US.get(num_rows)
            figures.append(Figure(f"{kind}, {num_rows} rows", values, "us", bar=bar, note=note))
            for row in rows:
                sampler.release(row.request_id)
    figures.append(host_us(sampler, buffers, kinds[-1], repeat))
    return Report("sampling", tuple(figures))


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Time to choose tokens on the device.", repeat=5)
    args = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("sampling on the device is measured on a CUDA device: there is none")
    return publish(measure(args.repeat))


if __name__ == "__main__":
    sys.exit(main())
