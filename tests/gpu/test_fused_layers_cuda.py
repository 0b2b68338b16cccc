"""Models on a GPU: nearly the same logits with and without built-in kernels, at every launch
level.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from llm.config import PipelineConfig
from llm.kernels.elementwise import normalise
from llm.kernels.invariant import ALIGNMENT
from llm.kernels.registry import KernelSet
from llm.kernels.tuning import MAX_ROWS
from llm.layers.decoder import LogitsHead, RMSNorm
from llm.layers.fused import FusedHead
from llm.layers.linear import FloatLinear
from llm.layers.weight import LinearWeight
from llm.runner.model_runner import ModelRunner
from tests.llm.llama_checkpoints import SMALL, batch, random_ids, row, write_llama, write_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 200,
    "head_dim": 64,
}
PROMPT = 12


@pytest.fixture(scope="module", params=["llama", "llama with biases", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    if request.param == "qwen3":
        return write_random(folder, Qwen3Config(**(SMALL | SHAPE)), dtype=torch.bfloat16)
    has_bias = request.param != "llama"
    return write_llama(folder, attention_bias=has_bias, mlp_bias=has_bias, **SHAPE)


MOST = 1.5  # times the rounding of plain layers; another order of sums has about as much


def logits(checkpoint: Path, rows: int, encoding: str = "bfloat16", **values: Any) -> Tensor:
    """Return [forwards, rows, V]: a prompt of each row, then two more tokens."""
    model = {
        "model_path": str(checkpoint),
        "device_specs": ["cuda"],
        "quantization_encoding": encoding,
        "kv_cache": {"kv_cache_page_size": 16, "num_pages": 64},
    }
    runner = ModelRunner(PipelineConfig(model=model, **values))
    runner.initialize()
    ids = [random_ids(PROMPT + 2, SHAPE["vocab_size"], seed=n) for n in range(rows)]
    found = []
    for start, end in ((0, PROMPT), (PROMPT, PROMPT + 1), (PROMPT + 1, PROMPT + 2)):
        step = [row(ids[n][start:end], [n + 1], start, request_id=f"r{n}") for n in range(rows)]
        found.append(runner.forward(runner.prepare(batch(*step))).next_token_logits.clone())
    return torch.stack(found).cpu()


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_kernels_change_logits_by_no_more_than_rounding(checkpoint: Path, rows: int) -> None:
    expected = logits(checkpoint, rows, use_vendor_blas="true")
    for switches in ({}, {"use_experimental_kernels": "true"}):
        found = logits(checkpoint, rows, **switches)
        assert (found - expected).norm() / expected.norm() < 0.03
        for level in ("1", "2"):
            assert torch.equal(logits(checkpoint, rows, pdl_level=level, **switches), found)


def head_of(rows: int, num_out: int, num_in: int) -> tuple[Tensor, LogitsHead, Tensor]:
    """Return random rows, a head, and its logits in double precision."""
    device = torch.device("cuda")
    made = torch.Generator("cuda").manual_seed(rows)
    x, weight = (
        torch.randn(count, num_in, generator=made, device=device).bfloat16()
        for count in (rows, num_out)
    )
    norm = RMSNorm(torch.ones(num_in, device=device, dtype=torch.bfloat16), 1e-5)
    linear = FloatLinear(LinearWeight(weight), torch.bfloat16, device)
    exact = normalise(x, norm.gain, norm.epsilon).double() @ weight.double().t()
    return x, LogitsHead(norm, linear), exact


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def largest_error(rows: int) -> float:
    return 3e-3 if rows <= MAX_ROWS else 1e-5  # few rows: the norm is not rounded


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 100, 150, 256, 300])
@pytest.mark.parametrize(("num_out", "num_in"), [(66_001, 1024), (66_001, 3072), (66_000, 1024)])
def test_a_head_of_a_large_vocabulary(rows: int, num_out: int, num_in: int) -> None:
    """Logits are not rounded to the format of the matrix."""
    x, reference, exact = head_of(rows, num_out, num_in)
    for experimental in (False, True):
        kernels = KernelSet.choose(vendor_blas=False, experimental=experimental, launch_level=0)
        assert error(FusedHead(reference, kernels)(x), exact) < largest_error(rows)


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 100, 150, 256, 300])
@pytest.mark.parametrize(
    ("num_out", "common"), [(140_002, (75_003, 140_002)), (140_000, (66_001, 90_000))]
)
@pytest.mark.parametrize("level", [0, 2])
def test_a_head_of_common_ids(rows: int, num_out: int, common: tuple[int, int], level: int) -> None:
    """Logits of common ids alone, then of some of them, then of all, with a captured graph."""
    x, reference, exact = head_of(rows, num_out, 512)
    kernels = KernelSet.choose(vendor_blas=False, experimental=True, launch_level=level)
    head = FusedHead(reference, kernels)
    assert head.limit(common)
    out = torch.full((rows, num_out), torch.nan, device=x.device)
    needed = torch.tensor(common, dtype=torch.int32, device=x.device)
    head(x, out, needed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head(x, out, needed)

    most, start = largest_error(rows), common[0]
    for first, end in (common, (start + 500, start + 777), (start, start + 60)):
        needed.copy_(torch.tensor((first, end)))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out[:, first:end], exact[:, first:end]) < most
        assert out[:, : start // ALIGNMENT * ALIGNMENT].isnan().all()
        if rows <= MAX_ROWS:
            assert out[:, : first - ALIGNMENT].isnan().all()
            assert out[:, end:].isnan().all()
    for first, end in ((0, num_out), (0, 1000)):  # the latter: no common ids
        needed.copy_(torch.tensor((first, end)))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out[:, first:end], exact[:, first:end]) < most


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler
@pytest.mark.parametrize("rows", [1, 3])
def test_compiled_layers_change_logits_by_no_more_than_rounding(
    checkpoint: Path, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoding replays compiled layers like others."""
    exact = logits(checkpoint, rows, "float32", use_vendor_blas="true")
    rounding = (logits(checkpoint, rows, use_vendor_blas="true") - exact).norm()
    with caplog.at_level(logging.WARNING):
        found = logits(checkpoint, rows, use_legacy_module=False)
    assert "torch.compile failed" not in caplog.text
    assert (found - exact).norm() < MOST * rounding
