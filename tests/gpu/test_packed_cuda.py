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

from benchmarks.kernel_shapes import PACKED, Product, ProductMethod, WeightsOfProduct, random_words
from benchmarks.kernels import packed_methods
from benchmarks.packed_shapes import GPTQ
from benchmarks.shapes import Shape, llama
from llm.batch import KVSlots
from llm.config import PipelineConfig
from llm.kernels.blocks import Blocks
from llm.kernels.products import gated_product, product
from llm.kernels.projections import project_heads
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


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + EPSILON) * gain.double()


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


SIZES = [(5120, 3072), (3072, 8192), (151, 896), (70, 160)]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_product_of_few_rows(kind: str, num_out: int, num_in: int, rows: int) -> None:
    """With the expanded numbers up to float32's rounding; no launch level changes a bit."""
    if num_in % PACKED[kind][1]:
        pytest.skip("groups do not divide the inputs")
    words = random_words(num_out, num_in, kind, num_in**-0.5)
    x, gain, bias = normal(rows, num_in), normal(num_in), normal(num_out)
    expected = normalised(x, gain) @ words.expand().double().t() + bias.double()
    item = Product("model", "product", num_out, num_in, packed=kind)
    blocks = item.blocks(rows)
    assert blocks is not None
    unit = 128 // words.bits
    for cut in (blocks, Blocks(4, 32 * unit, 4), Blocks(2, 64 * unit, 8, 132)):

        def run(level: int, out: Tensor, cut: Blocks = cut) -> Tensor:
            product(x, words, out, cut, gain=gain, epsilon=EPSILON, bias=bias, level=level)
            return out

        found = run(0, torch.empty(rows, num_out, device=CUDA))
        assert relative_error(found, expected) < 1e-5
        out = torch.empty_like(found)
        assert all(torch.equal(run(level, out), found) for level in (1, 2))
        assert torch.equal(captured(out, partial(run, 2, out)), found)


@pytest.mark.parametrize("kind", ["gptq", "awq", "q4_0", "q8_0"])
@pytest.mark.parametrize("rows", [1, 2])
def test_products_that_add_and_that_gate(kind: str, rows: int) -> None:
    words = random_words(2 * 512, 3072, kind, 3072**-0.5)
    x, old = normal(rows, 3072), normal(rows, 1024)
    expected = x.double() @ words.expand().double().t()
    for blocks in (Blocks(4, 4096, 4), Blocks(2, 2048, 8, 132)):
        out = old.clone()
        product(x, words, out, blocks, adds=True, level=2)
        assert relative_error(out, old.double() + expected) < 0.005
        gated = gated_product(x, words, blocks, level=2)
        gate, up = expected.chunk(2, dim=1)
        assert relative_error(gated, F.silu(gate) * up) < 0.005


@pytest.mark.parametrize("kind", ["gptq", "q4_1", "q6_k"])
def test_every_method_of_the_benchmark_is_right(kind: str) -> None:
    for item in (
        Product("llama-3b", "down", 3072, 8192, is_added=True, packed=kind),
        Product("llama-3b", "gate-up", 8192, 3072, parts=2, is_normed=True, packed=kind),
    ):
        weights = WeightsOfProduct(item, 1, 1)
        for method in [ProductMethod(), *list(packed_methods(item, 1))[::7]]:
            assert weights.error(method) < 0.01, method


@pytest.mark.parametrize("rows", [1, 2])
def test_projected_heads(rows: int) -> None:
    heads, kv_heads, size, hidden = 24, 8, 128, 3072
    x, norm = normal(rows, hidden), RMSNorm(normal(hidden), 1e-5)
    words = random_words((heads + 2 * kv_heads) * size, hidden, "gptq", hidden**-0.5)
    rotary = Rotary(RotaryConfig(size), 4096, CUDA)
    rotations = rotary.at(torch.randint(0, 4096, (rows,), device=CUDA))
    expected = F.linear(norm(x).float(), words.expand()).to(HALF).view(rows, -1, size)
    rotate_(expected[:, : heads + kv_heads], rotations)
    pool, counterpart = (KVPool(1, 4, 16, kv_heads, size, HALF, "cuda") for _ in range(2))
    slots = torch.randperm(64, device=CUDA)[:rows]
    counterpart.write(0, slots, expected[:, heads:].view(rows, 2, kv_heads, size))
    target = KVSlots(pool.keys(0), pool.values(0), slots)
    item = Product("llama-3b", "qkv", len(expected[0]) * size, hidden, packed="gptq")
    blocks = item.blocks(rows)
    assert blocks is not None
    query = project_heads(
        x,
        words,
        rotations,
        target,
        blocks,
        gain=norm.gain,
        epsilon=norm.epsilon,
        num_heads=heads,
        level=2,
    )
    assert relative_error(query, expected[:, :heads]) < 0.01
    assert relative_error(pool.storage[0], counterpart.storage[0]) < 0.01


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_a_product_of_many_rows(kind: str, num_out: int, num_in: int) -> None:
    """Up to bfloat16's rounding of the matrix; a row's result is its own, bit for bit."""
    if num_in % PACKED[kind][1]:
        pytest.skip("groups do not divide the inputs")
    layer = PackedLinear(random_words(num_out, num_in, kind, num_in**-0.5))
    x = normal(COUNTS[-1], num_in)
    whole = layer(x)
    matrix = layer.weight.expand().to(HALF)
    assert relative_error(whole, x.double() @ matrix.double().t()) < 0.003
    for count in COUNTS:
        for first in {0, (COUNTS[-1] - count) // 2, COUNTS[-1] - count}:
            assert torch.equal(layer(x[first : first + count]), whole[first : first + count]), count


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


SWITCHES: list[dict[str, Any]] = [
    {},
    {"use_experimental_kernels": "true", "pdl_level": "2"},
    {"batch_invariant": True},
]


@pytest.mark.parametrize("rows", [1, 2, 3, 20])
def test_a_packed_model_is_the_expanded_one(folder: Path, rows: int) -> None:
    """Both are as far from float32; the matrices are not expanded in memory."""
    exact = logits(runner_of(folder, "float32", "cpu"), rows)
    expanded = runner_of(folder, "bfloat16", "cuda")
    error = relative_error(logits(expanded, rows), exact)
    assert error < 0.05
    for switches in SWITCHES:
        runner = runner_of(folder, "gptq", "cuda", **dict(switches))
        assert runner.loaded_model.encoding.packed
        assert runner.weights_bytes < 0.5 * expanded.weights_bytes
        assert relative_error(logits(runner, rows), exact) < 1.3 * error, switches
    plain = runner_of(folder, "gptq", "cuda", use_vendor_blas="true")
    assert relative_error(logits(plain, rows), exact) < 1.3 * error


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_compiled_layers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = logits(runner_of(folder, "float32", "cpu"), 3)
    found = logits(runner_of(folder, "gptq", "cuda", use_legacy_module=False), 3)
    assert "torch.compile failed" not in caplog.text
    assert relative_error(found, exact) < 0.05


def test_captured_steps_are_the_eager_ones(folder: Path) -> None:
    values = {"use_experimental_kernels": "true", "pdl_level": "2", "max_batch_size": 4}
    for rows in (1, 2, 4):
        eager = logits(runner_of(folder, "gptq", "cuda", **values), rows)
        replayed = runner_of(folder, "gptq", "cuda", **values)
        replayed.use_graphs(CudaCapture(replayed.device))
        assert relative_error(logits(replayed, rows), eager) < 0.005
        assert replayed.graph_runner is not None
        assert replayed.graph_runner.stats().replays == 2
