"""Sampling on a real GPU: the reference's tokens, in graphs, without waiting."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import triton

from benchmarks import sampling
from llm.sampling.device.kernels import TILE_COLUMNS
from llm.sampling.device.sampler import DeviceSampler, SamplingBuffers
from tests.llm.kernels.kernel_comparison import compare_bitmasks, compare_kernels, compare_late_cuts
from tests.llm.sampling.device_rows import a_row, coarse_logits, random_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 500
CUDA = torch.device("cuda")


@pytest.mark.parametrize("seed", range(60))
def test_the_kernels_give_the_references_tokens(seed: int) -> None:
    compare_kernels(seed, CUDA, tile=(128, 512, None)[seed % 3], rows=16)


@pytest.mark.parametrize("seed", range(100, 105))
def test_the_same_over_a_large_vocabulary(seed: int) -> None:
    compare_kernels(seed, CUDA, TILE_COLUMNS, vocab=193_800, rows=24)


@pytest.mark.parametrize(("tile", "vocab"), [(TILE_COLUMNS, 20_000), (None, 3072)])
def test_a_nucleus_of_thousands(tile: int | None, vocab: int) -> None:
    compare_late_cuts(CUDA, tile, vocab)


@pytest.mark.parametrize(("tile", "vocab"), [(TILE_COLUMNS, 20_000), (None, 4096)])
def test_bitmasks(tile: int | None, vocab: int) -> None:
    compare_bitmasks(CUDA, tile, vocab)


def reference_tokens(seed: int, step: int) -> list[int]:
    sampler = DeviceSampler(VOCAB, torch.device("cpu"), 8)
    buffers = sampler.create_buffers()
    for earlier in range(step + 1):
        sampler.load(sampler.prepare(random_rows(seed, 6, VOCAB), earlier), buffers)
        tokens = sampler.sample(coarse_logits(8, VOCAB, earlier), buffers)
    return tokens.tolist()


class Captured:
    """A graph that samples for eight rows of `logits`."""

    def __init__(self) -> None:
        self.sampler = DeviceSampler(VOCAB, CUDA, 8, level=2)
        self.buffers: SamplingBuffers = self.sampler.create_buffers()
        self.logits = torch.zeros(8, VOCAB, device=CUDA)
        self.sampler.sample(self.logits, self.buffers)  # compiles the kernels
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.tokens = self.sampler.sample(self.logits, self.buffers)


def test_a_captured_graph_samples_what_was_loaded() -> None:
    captured = Captured()
    for seed in range(3):
        rows = random_rows(seed, 6, VOCAB)
        for step in range(4):
            captured.sampler.load(captured.sampler.prepare(rows, step), captured.buffers)
            captured.logits.copy_(coarse_logits(8, VOCAB, step))
            captured.graph.replay()
            assert captured.tokens.tolist() == reference_tokens(seed, step)
        for row in rows:
            captured.sampler.release(row.request_id)


@pytest.fixture
def waiting_is_an_error() -> Iterator[Callable[[], None]]:
    """Make waits an error from the call of the returned function on."""

    def forbid() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning that not every wait is detected
            torch.cuda.set_sync_debug_mode("error")

    yield forbid
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_and_nothing_is_allocated(
    waiting_is_an_error: Callable[[], None],
) -> None:
    captured = Captured()
    rows = [a_row(f"p{n}", (1, 2), repetition_penalty=1.1, seed=n) for n in range(2)]
    rows += random_rows(1, 4, VOCAB)
    logits = coarse_logits(8, VOCAB).to(CUDA)
    torch.cuda.synchronize()
    waiting_is_an_error()
    for step in range(4):
        captured.sampler.load(captured.sampler.prepare(rows, step), captured.buffers)
        held = torch.cuda.memory_stats()["allocation.all.allocated"]
        captured.sampler.sample(logits, captured.buffers)
        captured.graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == held


def test_no_request_waits_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary and a number of rows that no request had before."""
    sampler = DeviceSampler(1234, CUDA, 8)
    buffers = sampler.create_buffers()
    sampler.warm_up(buffers)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **call: compiled.append(call["repr"])
    )
    sampler.load(sampler.prepare(random_rows(2, 7, 1234)), buffers)
    sampler.sample(torch.zeros(7, 1234, device=CUDA), buffers)
    torch.cuda.synchronize()
    assert not compiled


def test_its_time_is_measured() -> None:
    report = sampling.measure(repeat=1, kinds=("speech",))
    assert len(report.figures) == len(sampling.BATCHES) + 1
    assert all(1 < figure.value < 100_000 for figure in report.figures)
