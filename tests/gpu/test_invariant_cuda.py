"""Products on a real GPU that do not depend, bit for bit, on the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.batch_invariance import measure
from benchmarks.shapes import LLAMA_1B, Shape
from llm.layers.factory import LinearFactory
from llm.layers.linear import InvariantLinear
from llm.layers.weight import LinearWeight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
COUNTS = (1, 2, 7, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 150, 170, 200, 300)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_out", "num_in", "dtype"),
    [
        (2048, 2048, torch.bfloat16),
        (3072, 1000, torch.bfloat16),
        (70, 8192, torch.bfloat16),
        (66_001, 1000, torch.bfloat16),
        (130, 264, torch.float16),
        (130, 264, torch.float32),
    ],
)
def test_a_rows_product_is_its_own(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    layer = InvariantLinear(LinearWeight(normal(num_out, num_in)), dtype, CUDA)
    x = normal(COUNTS[-1], num_in, seed=1).to(CUDA, dtype)
    whole = layer(x)
    exact = x.double() @ layer.weight.double().t()
    error = (whole.double() - exact).norm() / exact.norm()
    assert error < (0.003 if dtype.itemsize == 2 else 1e-5)
    for count in COUNTS:
        for first in {0, (COUNTS[-1] - count) // 2, COUNTS[-1] - count}:
            part = layer(x[first : first + count])
            assert torch.equal(part, whole[first : first + count]), (count, first)


def test_the_factory_makes_them_on_a_gpu() -> None:
    weight = LinearWeight(normal(64, 64))
    factory = LinearFactory(dtype=torch.bfloat16, device=CUDA, int8=False, batch_invariant=True)
    assert isinstance(factory.linear(weight), InvariantLinear)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_other_requests_of_a_batch_change_no_token(backend: str) -> None:
    """On a model of two layers, with everything else as in a server."""
    shape = Shape("two layers", {**LLAMA_1B.values, "num_hidden_layers": 2})
    values = {
        "max_batch_size": 16,
        "model": {
            "device_specs": ["cuda:0"],
            "batch_invariant": True,
            "attention_backend": backend,
            "kv_cache": {"num_pages": 300, "enable_prefix_caching": False},
        },
    }
    for kind, found in measure(shape, values, count=16, num_tokens=24):
        assert not any(map(any, found.other_tokens)), kind
