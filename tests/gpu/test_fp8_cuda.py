"""Float8 matrices on a GPU: the products of the CPU's emulation, kernels, captured models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_shapes import Product, ProductMethod, WeightsOfProduct
from llm.config import PipelineConfig
from llm.kernels.blocks import Blocks
from llm.kernels.elementwise import normalise
from llm.kernels.float8 import add_scaled, gate_quantized, normalise_quantized, quantize
from llm.kernels.rounding import quantize_rows
from llm.layers.decoder import silu_and_multiply
from llm.layers.linear import Float8Linear
from llm.layers.weight import LinearWeight
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import batch, float8_checkpoint, random_ids, row, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device of compute capability 9.0",
    ),
]

CPU, CUDA, HALF = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
COUNTS = (1, 2, 17, 65, 129, 300)
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 200,
    "head_dim": 64,
    "initializer_range": 0.06,
}
PROMPT = 12


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu().double(), expected.cpu().double()
    return ((found - expected).norm() / expected.norm()).item()


def test_rows_are_rounded_as_on_a_cpu() -> None:
    """Bit for bit, also where values are below the normal numbers."""
    x = normal(300, 3072).to(HALF)
    x[:, ::3] *= 1e-4
    found, expected = quantize(x.to(CUDA)), quantize_rows(x)
    assert torch.equal(found.values.cpu().view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize("rows", [1, 5, 600])
def test_rounding_after_a_norm_and_a_gate(rows: int) -> None:
    x, gain = normal(rows, 3072).to(CUDA, HALF), normal(3072, seed=1).to(CUDA, HALF)
    wide = x.float()
    normed = (wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + 1.0) * gain).to(HALF)
    gate, up = x.float().chunk(2, dim=1)
    gated = (F.silu(gate) * up).to(HALF)
    for found, exact in (
        (normalise_quantized(x, gain, 1.0), normed),
        (gate_quantized(x), gated),
    ):
        expected = quantize_rows(exact)
        for part in (found, expected):
            assert relative_error(part.values.float() * part.scales[:, None], exact) < 0.04
        assert (found.values.float() == expected.values.float()).float().mean() > 0.98
    assert relative_error(gated, silu_and_multiply(x.clone())) < 0.01


@pytest.mark.parametrize("rows", [3, 64, 600])
def test_readers_of_a_product_apply_its_scales(rows: int) -> None:
    """They do the same with a product that has been multiplied by its scales."""
    layer = Float8Linear(LinearWeight(normal(2048, 1024, seed=2)), HALF, CUDA)
    rounded = quantize(normal(rows, 1024).to(CUDA, HALF))
    product, plain = layer.multiply(rounded), layer(rounded)
    x, gain = normal(rows, 2048, seed=1).to(CUDA, HALF), normal(2048, seed=3).to(CUDA, HALF)
    found, expected = x.clone(), x + plain
    add_scaled(found, product)
    assert relative_error(found, expected) < 0.004
    found = x.clone()
    for got, wanted in (
        (normalise_quantized(found, gain, 1.0, added=product), normalise(expected, gain, 1.0)),
        (gate_quantized(product), silu_and_multiply(plain.clone())),
    ):
        assert relative_error(got.values.float() * got.scales[:, None], wanted) < 0.04
    assert relative_error(found, expected) < 0.004


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(3072, 8192), (5120, 3072), (64, 48), (70, 8192), (130, 264)]
)
def test_products_are_those_of_the_emulation(num_out: int, num_in: int, invariant: bool) -> None:
    weight, x = LinearWeight(normal(num_out, num_in)), normal(COUNTS[-1], num_in, seed=1).to(HALF)
    layer = Float8Linear(weight, HALF, CUDA, is_invariant=invariant)
    assert layer.uses_blas == (not invariant and num_out % 16 == num_in % 16 == 0)
    whole = layer(x.to(CUDA))
    expected = Float8Linear(weight, torch.float32, CPU)(x)
    assert relative_error(whole, expected) < 0.003
    for count in COUNTS:
        part = layer(x[:count].to(CUDA))
        assert relative_error(part, expected[:count]) < 0.003
        if not layer.uses_blas:
            assert torch.equal(part, whole[:count]), count


ITEMS = [
    Product("llama-3b", "qkv", 5120, 3072, is_normed=True, is_float8=True),
    Product("llama-3b", "down", 3072, 8192, is_added=True, is_float8=True),
    Product("llama-3b", "gate-up", 8192, 3072, parts=2, is_normed=True, is_float8=True),
    Product("odd", "down", 48, 1040, is_added=True, is_float8=True),
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: f"{item.model} {item.name}")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("in_half", [False, True])
def test_kernels_of_few_rows(item: Product, rows: int, in_half: bool) -> None:
    weights = WeightsOfProduct(item, rows, 1)
    for blocks in (item.blocks(rows, in_half=in_half), Blocks(4, 1024, 8, 264, in_half)):
        assert weights.error(ProductMethod(blocks)) < 0.01


def logits(folder: Path, rows: int, device: str = "cuda", **values: Any) -> Tensor:
    """Return [forwards, rows, V]: a prompt of each row, then two more tokens."""
    model = {
        "model_path": str(folder),
        "device_specs": [device],
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64, **values.pop("kv_cache", {})},
        "quantization_encoding": values.pop("encoding", "float8_e4m3fn"),
        "batch_invariant": values.pop("batch_invariant", False),
    }
    runner = ModelRunner(PipelineConfig(model=model, **values))
    runner.initialize()
    assert runner.loaded_model.encoding.float8 == (model["quantization_encoding"] != "float32")
    ids = [random_ids(PROMPT + 2, SHAPE["vocab_size"], seed=n) for n in range(rows)]
    found = []
    for start, end in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 2)):
        step = [row(ids[n][start:end], [n + 1], start, request_id=f"r{n}") for n in range(rows)]
        found.append(runner.forward(runner.prepare(batch(*step))).next_token_logits.clone())
    return torch.stack(found).cpu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "model", **SHAPE)


SWITCHES: list[dict[str, Any]] = [
    {},
    {"use_vendor_blas": "true"},
    {"use_experimental_kernels": "true"},
    {"batch_invariant": True},
]


def assert_no_worse(found: Tensor, emulated: Tensor, exact: Tensor) -> None:
    """Two ways to compute round some numbers to another number of float8, so that they differ by
    nearly as much as both do from float32.
    """
    assert relative_error(found, exact) < 1.3 * relative_error(emulated, exact)
    assert relative_error(found, emulated) < 1.3 * relative_error(emulated, exact)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_model_gives_the_logits_of_the_emulation(folder: Path, rows: int) -> None:
    exact = logits(folder, rows, "cpu", encoding="float32")
    emulated = logits(folder, rows, "cpu")
    for switches in SWITCHES:
        assert_no_worse(logits(folder, rows, **dict(switches)), emulated, exact)


def test_the_launch_level_changes_no_bit(folder: Path) -> None:
    plain = logits(folder, 1, use_experimental_kernels="true")
    values = {"use_experimental_kernels": "true", "pdl_level": "2"}
    assert torch.equal(logits(folder, 1, **values), plain)


def test_biases_and_float8_pages(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, attention_bias=True, mlp_bias=True, **SHAPE)
    pages = {"kv_cache_format": "float8_e4m3fn"}
    exact = logits(folder, 2, "cpu", encoding="float32")
    emulated = logits(folder, 2, "cpu", kv_cache=dict(pages))
    assert_no_worse(logits(folder, 2, kv_cache=dict(pages)), emulated, exact)


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
def test_compiled_layers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = logits(folder, 3, use_legacy_module=False)
    assert "torch.compile failed" not in caplog.text
    exact = logits(folder, 3, "cpu", encoding="float32")
    assert_no_worse(found, logits(folder, 3, "cpu"), exact)


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_a_float8_checkpoint_is_float8_by_default(tmp_path: Path, strategy: str) -> None:
    source = write_llama(tmp_path / "source", **SHAPE)
    stored = float8_checkpoint(source, tmp_path / "float8", strategy)
    exact = logits(source, 3, "cpu", encoding="float32")
    emulated = logits(stored, 3, "cpu", encoding=None)
    assert_no_worse(logits(stored, 3, encoding=None), emulated, exact)
