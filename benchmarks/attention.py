"""Speed of attention over the KV pool on a CUDA device: decoding, prompts, and planning.

    decode     one captured decode step's attention of one layer; share of a large copy's bandwidth
    replan     host time to update a captured plan for the next batch
    prompts    attention of one layer over prompts, without a graph

Layers have separate keys and values, more than the device's cache holds. The figures do not
include the stores of a step.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.core import bandwidth
from benchmarks.report import Figure, Report, arguments, publish, until_interrupted
from llm.attention.base import AttentionBackend, AttentionOptions, CapturedShape
from llm.attention.registry import create_attention_backend
from llm.batch import ForwardBatch, ForwardMode
from llm.kv_cache.kv_pool import KVPool

LAYERS = 8
CONTEXT = 600
PAGE_SIZE = 128
BATCHES = (1, 8, 64, 256, 448)
PROMPTS = ((2048,) * 4, (8192,), (300,) * 27)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one layer."""

    queries: int
    keys: int
    size: int


MODELS = {
    "llama-3.2-1b": Heads(32, 8, 64),
    "llama-3.2-3b": Heads(24, 8, 128),
    "qwen3-0.6b": Heads(16, 8, 128),
}


class Subject:
    """A backend over a pool with the contexts of some rows, and their queries."""

    def __init__(self, name: str, heads: Heads, lengths: Sequence[int], fed: Sequence[int]) -> None:
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        made = torch.Generator().manual_seed(0)
        order = (torch.randperm(sum(counts), generator=made) + 1).split(counts)
        pages = [part.tolist() for part in order]
        num_pages = sum(counts) + 1
        pool = KVPool(LAYERS, num_pages, PAGE_SIZE, heads.keys, heads.size, torch.bfloat16, "cuda")
        for storage in pool.storage:
            storage.normal_()
        options = AttentionOptions(heads.queries, torch.bfloat16)
        self.backend: AttentionBackend[object] = create_attention_backend(name, pool, options)
        self.batch = batch_of(pages, lengths, fed)
        self.kv_bytes = sum(lengths) * 2 * heads.keys * heads.size * pool.dtype.itemsize
        pairs = sum(
            n * (length - n) + n * (n + 1) / 2 for length, n in zip(lengths, fed, strict=True)
        )
        self.flops = 4 * heads.queries * heads.size * pairs
        shape = (sum(fed), heads.queries, heads.size)
        self.query = torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def attend(self, plan: object) -> None:
        """Run the attention of every layer."""
        for layer in range(LAYERS):
            self.backend.attend(plan, layer, self.query)


def batch_of(pages: list[list[int]], lengths: Sequence[int], fed: Sequence[int]) -> ForwardBatch:
    """Return a batch in which each row feeds its last tokens."""

    def on_device(values: list[Tensor]) -> Tensor:
        return torch.cat(values).cuda()

    positions = [torch.arange(n - new, n) for n, new in zip(lengths, fed, strict=True)]
    slots = [
        torch.tensor(table)[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        for table, at in zip(pages, positions, strict=True)
    ]
    return ForwardBatch(
        mode=ForwardMode.DECODE if set(fed) == {1} else ForwardMode.EXTEND,
        request_ids=tuple(map(str, range(len(lengths)))),
        query_lens=tuple(fed),
        context_lens=tuple(lengths),
        pages=tuple(pages),
        page_size=PAGE_SIZE,
        input_ids=on_device([torch.zeros_like(at) for at in positions]),
        positions=on_device(positions),
        slot_mapping=on_device(slots),
    )


def device_us(work: Callable[[], None], repeat: int) -> tuple[float, ...]:
    """Return several measurements of device time per layer, in microseconds."""
    found = []
    for _ in range(repeat + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / LAYERS)
    return tuple(found[1:])


def decoding(name: str, backend: str, num_rows: int, repeat: int, copy: float) -> Iterator[Figure]:
    """Measure one layer's attention in a captured step, and the host's part."""
    heads = MODELS[name]
    subject = Subject(backend, heads, [CONTEXT] * num_rows, [1] * num_rows)
    plan = subject.backend.capture_plan(CapturedShape(num_rows), CONTEXT)
    subject.backend.replan(plan, subject.batch)
    subject.attend(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        subject.attend(plan)
    values = device_us(graph.replay, repeat)
    rate = subject.kv_bytes / statistics.median(values) * 1e6
    note = f"{rate / 1e12:.2f} TB/s, {rate / copy:.0%} of a copy's"
    yield Figure(f"{name}: decode, {num_rows} rows", values, "us", note=note)
    host = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        subject.backend.replan(plan, subject.batch)
        host.append(1e6 * (time.perf_counter() - started))
    yield Figure(f"{name}: replan, {num_rows} rows", tuple(host[1:]), "us of the host")


def prompting(name: str, backend: str, lengths: Sequence[int], repeat: int) -> Figure:
    """Measure one layer's attention over whole prompts."""
    subject = Subject(backend, MODELS[name], lengths, lengths)
    plan = subject.backend.plan(subject.batch)
    values = device_us(lambda: subject.attend(plan), repeat)
    note = f"{subject.flops / statistics.median(values) / 1e6:.0f} TFLOP/s"
    return Figure(f"{name}: {len(lengths)} prompts of {lengths[0]}", values, "us", note=note)


def figures(models: Sequence[str], backend: str, repeat: int) -> Iterator[Figure]:
    copy = bandwidth(torch.device("cuda"))
    for name in models:
        for num_rows in BATCHES:
            yield from decoding(name, backend, num_rows, repeat, copy)
        for lengths in PROMPTS:
            yield prompting(name, backend, lengths, repeat)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Times of attention over the KV pool.", repeat=20, has_model=False)
    options.add_argument("--backend", default="auto", help="attention backend")
    options.add_argument("--shape", choices=MODELS, action="append", help="of which model (all)")
    args = options.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("attention is measured on a CUDA device: there is none")
    found = figures(args.shape or tuple(MODELS), args.backend, args.repeat)
    return publish(Report("attention", tuple(until_interrupted(found))))


if __name__ == "__main__":
    sys.exit(main())
