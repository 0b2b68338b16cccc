"""Packed matrices on a GPU: kernels against the expanded numbers, models and captured steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_shapes import Product, ProductMethod, WeightsOfProduct, random_words
from benchmarks.kernels import methods
from benchmarks.packed_shapes import GPTQ
from benchmarks.shapes import Shape, llama
from llm.batch import KVSlots
from llm.config import PipelineConfig
from llm.kernels.packed import expand, is_few, packed_gated_product, packed_heads, packed_product
from llm.kernels.words import Words
from llm.kv_cache.kv_pool import KVPool
from llm.layers.decoder import RMSNorm, Rotary, rotate_
from llm.layers.linear import PackedLinear
from llm.layers.rotary import RotaryConfig
from llm.runner.graphs.capture import CudaCapture
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import batch, random_ids, row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a CUDA device of compute capability 8.0",
    ),
]

CUDA, HALF = torch.device("cuda"), torch.bfloat16
EPSILON = 1e-5
COUNTS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 200, 300)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=CUDA).mul_(scale).to(HALF)


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


def captured(out: Tensor, run: Callable[[], Tensor]) -> Tensor:
    """Return `out` after a replayed graph of `run`, which writes it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out


CASES = [
    ("gptq", 5120, 3072),
    ("awq", 151, 896),
    ("q4_0", 5120, 3072),
    ("q4_0", 70, 160),
    ("q4_1", 70, 160),
    ("q4_k", 70, 256),
    ("q6_k", 151, 896),
    ("q8_0", 70, 160),
]
"""Formats, outputs and inputs; every case has kernels of its own, which are compiled."""


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + EPSILON) * gain.double()


@pytest.mark.parametrize(("kind", "num_out", "num_in"), CASES)
def test_a_product_of_few_rows(kind: str, num_out: int, num_in: int) -> None:
    """With the numbers themselves up to float32's rounding; no launch level changes a bit."""
    words = random_words(num_out, num_in, kind, num_in**-0.5)
    matrix = words.expand().double().t()
    for rows in (1, 2):
        x, gain, bias = normal(rows, num_in), normal(num_in), normal(num_out)
        out = torch.empty(rows, num_out, device=CUDA)
        packed_product(x, words, out)
        assert relative_error(out, x.double() @ matrix) < 2e-6
        packed_product(x, words, out, adds=True, bias=bias)
        assert relative_error(out, 2 * (x.double() @ matrix) + bias.double()) < 2e-6

        def run(level: int, out: Tensor = out, x: Tensor = x, gain: Tensor = gain) -> Tensor:
            packed_product(x, words, out, gain=gain, epsilon=EPSILON, level=level)
            return out

        found = run(0).clone()
        assert relative_error(found, normalised(x, gain) @ matrix) < 2e-6
        assert all(torch.equal(run(level), found) for level in (1, 2))
        assert torch.equal(captured(out, partial(run, 2)), found)
        narrow = torch.empty(rows, num_out, device=CUDA, dtype=HALF)
        packed_product(x, words, narrow, gain=gain, epsilon=EPSILON)
        assert torch.equal(narrow, found.to(HALF))


@pytest.mark.parametrize("num_in", [24_576, 40_960])
def test_rows_of_many_inputs(num_in: int) -> None:
    words = random_words(48, num_in, "q4_0", num_in**-0.5)
    x, gain = normal(2, num_in), normal(num_in)
    assert is_few(words, 2) == (num_in == 24_576)
    if is_few(words, 2):
        out = torch.empty(2, 48, device=CUDA)
        packed_product(x, words, out, gain=gain, epsilon=EPSILON, level=2)
        expected = normalised(x, gain) @ words.expand().double().t()
        assert relative_error(out, expected) < 2e-6
    found = PackedLinear(words)(x)
    assert relative_error(found, x.double() @ words.expand().double().t()) < 0.003


def test_rows_of_unlike_numbers() -> None:
    """Small numbers next to great ones, zeros, and what is not a number."""
    words = random_words(48, 1024, "q4_0", 1 / 32)
    x = normal(2, 1024) * torch.logspace(-12, 12, 1024, device=CUDA).to(HALF)
    x[1, :256] = 0
    matrix, out = words.expand().double().t(), torch.empty(2, 48, device=CUDA)
    packed_product(x, words, out)
    assert relative_error(out, x.double() @ matrix) < 2e-6
    x = torch.zeros_like(x)
    packed_product(x, words, out)
    assert not out.any()
    for value in (float("nan"), float("inf")):
        x[1, 700] = value
        packed_product(x, words, out)
        assert not out[0].any()
        assert not out[1].isfinite().any()


@pytest.mark.parametrize("kind", ["gptq", "q4_1"])
def test_a_gated_product(kind: str) -> None:
    words = random_words(2 * 512, 3072, kind, 3072**-0.5)
    for rows in (1, 2):
        x, gain = normal(rows, 3072), normal(3072)
        gated = packed_gated_product(x, words, gain=gain, epsilon=EPSILON, level=2)
        products = normalised(x, gain) @ words.expand().double().t()
        gate, up = products.chunk(2, dim=1)
        assert relative_error(gated, F.silu(gate) * up) < 0.003


@pytest.mark.parametrize("kind", ["gptq", "q6_k"])
def test_every_method_of_the_benchmark_is_right(kind: str) -> None:
    for item in (
        Product("llama-3b", "down", 3072, 8192, is_added=True, packed=kind),
        Product("llama-3b", "gate-up", 8192, 3072, parts=2, is_normed=True, packed=kind),
    ):
        weights = WeightsOfProduct(item, 1, 1)
        vendor = [] if item.is_normed else [ProductMethod()]  # which does not normalise
        for method in [*vendor, *methods(item, 1)]:
            assert weights.error(method) < 0.01, method


@pytest.mark.parametrize("rows", [1, 2])
def test_projected_heads(rows: int) -> None:
    heads, kv_heads, size, hidden = 24, 8, 128, 3072
    x, norm = normal(rows, hidden), RMSNorm(normal(hidden), 1e-5)
    words = random_words((heads + 2 * kv_heads) * size, hidden, "gptq", hidden**-0.5)
    bias = normal(words.shape[0])
    rotary = Rotary(RotaryConfig(size), 4096, CUDA)
    rotations = rotary.at(torch.randint(0, 4096, (rows,), device=CUDA))
    expected = (F.linear(norm(x).float(), words.expand()) + bias).to(HALF).view(rows, -1, size)
    rotate_(expected[:, : heads + kv_heads], rotations)
    pool, counterpart = (KVPool(1, 4, 16, kv_heads, size, HALF, "cuda") for _ in range(2))
    slots = torch.randperm(64, device=CUDA)[:rows]
    counterpart.write(0, slots, expected[:, heads:].view(rows, 2, kv_heads, size))
    target = KVSlots(pool.keys(0), pool.values(0), slots)
    query = packed_heads(
        x,
        words,
        rotations,
        target,
        gain=norm.gain,
        epsilon=norm.epsilon,
        bias=bias,
        num_heads=heads,
        level=2,
    )
    assert relative_error(query, expected[:, :heads]) < 0.01
    assert relative_error(pool.storage[0], counterpart.storage[0]) < 0.01


@pytest.mark.parametrize(("kind", "num_out", "num_in"), CASES)
def test_a_product_of_many_rows(kind: str, num_out: int, num_in: int) -> None:
    """In one order of sums a row's result is its own, bit for bit."""
    words = random_words(num_out, num_in, kind, num_in**-0.5)
    layer, fast = PackedLinear(words, is_invariant=True), PackedLinear(words)
    x = normal(COUNTS[-1], num_in)
    whole = layer(x)
    expected = x.double() @ words.expand().double().t()
    assert relative_error(whole, expected) < 0.003
    for count in COUNTS:
        assert relative_error(fast(x[:count]), expected[:count]) < 0.005
        for first in {0, (COUNTS[-1] - count) // 2, COUNTS[-1] - count}:
            assert torch.equal(layer(x[first : first + count]), whole[first : first + count]), count


@pytest.mark.parametrize(("kind", "num_out", "num_in"), CASES)
def test_an_expanded_matrix(kind: str, num_out: int, num_in: int) -> None:
    words = random_words(num_out, num_in, kind, num_in**-0.5)
    found = expand(words, torch.empty(num_out, num_in, device=CUDA, dtype=HALF))
    assert torch.equal(found, words.expand().to(HALF))


def test_words_are_packed_on_the_device() -> None:
    numbers = torch.randint(0, 16, (7, 96), dtype=torch.uint8)
    scales = torch.randn(7, 3)
    here, there = (Words.pack(numbers.to(d), scales.to(d), None, 4) for d in ("cpu", CUDA))
    assert torch.equal(here.values, there.values.cpu())
    assert torch.equal(here.expand(), there.expand().cpu())


VALUES = llama(hidden=256, inner=512, layers=3, heads=4, kv_heads=2, head_dim=64, vocab=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Shape("toy", VALUES).in_format(GPTQ).write(tmp_path_factory.mktemp("packed"))


def runner_of(folder: Path, encoding: str | None, device: str, **values: Any) -> ModelRunner:
    model = {
        "model_path": str(folder),
        "device_specs": [device],
        "quantization_encoding": encoding,
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
        "batch_invariant": values.pop("batch_invariant", False),
        "disable_cuda_graph": True,  # a test captures by itself
    }
    runner = ModelRunner(PipelineConfig(model=model, **values))
    runner.initialize()
    return runner


def logits(runner: ModelRunner, rows: int) -> Tensor:
    """Return [forwards, rows, V]: a prompt of each row, then two more tokens."""
    ids = [random_ids(14, VALUES["vocab_size"], seed=n) for n in range(rows)]
    found = []
    for start, end in ((0, 12), (12, 13), (13, 14)):
        step = [row(ids[n][start:end], [n + 1], start, request_id=f"r{n}") for n in range(rows)]
        found.append(runner.forward(runner.prepare(batch(*step))).next_token_logits.clone())
    return torch.stack(found).float().cpu()


def row_error(found: Tensor, exact: Tensor) -> float:
    """Return the geometric mean of the rows' errors: at a near tie of two keys the smallest
    rounding gives a row of this random model quite other logits.
    """
    errors = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return errors.log().mean().exp().item()


SWITCHES: list[dict[str, Any]] = [
    {},
    {"use_experimental_kernels": "true", "pdl_level": "2"},
    {"batch_invariant": True},
]


@pytest.mark.parametrize("rows", [1, 2, 20])
def test_a_packed_model_is_the_expanded_one(folder: Path, rows: int) -> None:
    """Both are as far from float32; the matrices are not expanded in memory."""
    exact = logits(runner_of(folder, "float32", "cpu"), rows)
    expanded = runner_of(folder, "bfloat16", "cuda", use_vendor_blas="true")
    error = row_error(logits(expanded, rows), exact)
    assert error < 0.03
    for switches in SWITCHES:
        runner = runner_of(folder, "gptq", "cuda", **dict(switches))
        assert runner.loaded_model.encoding.packed
        assert runner.weights_bytes < 0.5 * expanded.weights_bytes
        assert row_error(logits(runner, rows), exact) < 1.5 * error, switches
    plain = runner_of(folder, "gptq", "cuda", use_vendor_blas="true")
    assert row_error(logits(plain, rows), exact) < 1.5 * error


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_compiled_layers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = logits(runner_of(folder, "float32", "cpu"), 3)
    found = logits(runner_of(folder, "gptq", "cuda", use_legacy_module=False), 3)
    assert "torch.compile failed" not in caplog.text
    assert relative_error(found, exact) < 0.05


def test_captured_steps_are_as_exact_as_eager_ones(folder: Path) -> None:
    """Their attention has other orders of sums, also in the prompt that both begin with."""
    values = {"use_experimental_kernels": "true", "pdl_level": "2", "max_batch_size": 4}
    for rows in (1, 2, 4):
        exact = logits(runner_of(folder, "float32", "cpu"), rows)
        eager = row_error(logits(runner_of(folder, "gptq", "cuda", **values), rows), exact)
        replayed = runner_of(folder, "gptq", "cuda", **values)
        replayed.use_graphs(CudaCapture(replayed.device))
        assert row_error(logits(replayed, rows), exact) < 1.5 * eager
        assert replayed.graph_runner is not None
        assert replayed.graph_runner.stats().replays == 2
