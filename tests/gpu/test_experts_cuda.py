"""Grouped products of experts at real sizes: close to float64, the same bits alone, in a batch and
in graphs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.kernels.rounding import quantize_rows
from llm.layers.experts import ExpertMatrix, ExpertsShape, GroupedExperts, choose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
HIDDEN = 2048
SHAPES = {
    "30B-A3B": ExpertsShape(128, 8, 768, 0, normalizes=True),
    "Next": ExpertsShape(512, 10, 512, 0, normalizes=True),
    "few": ExpertsShape(6, 2, 200, 0, normalizes=False),
}
COUNTS = (1, 3, 17, 64, 200, 1500)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


def experts(
    shape: ExpertsShape, dtype: torch.dtype, own: range | None = None, *, float8: bool = False
) -> GroupedExperts:
    """Return random experts; `own`: those of a rank."""
    own = range(shape.num_experts) if own is None else own
    matrices = []
    for num_out, num_in in ((2 * shape.inner_size, HIDDEN), (HIDDEN, shape.inner_size)):
        values = normal(len(own), num_out, num_in, dtype=dtype) * num_in**-0.5
        if float8:
            rows = quantize_rows(values.flatten(0, 1))
            values = rows.values.view(values.shape)
            matrices.append(ExpertMatrix(values, rows.scales.view(values.shape[:2])))
        else:
            matrices.append(ExpertMatrix(values))
    return GroupedExperts(shape, own.start, *matrices)


def exact(layer: GroupedExperts, x: Tensor, logits: Tensor) -> Tensor:
    """Return the same sums in float64."""
    chosen, shares = choose(logits, layer.shape)
    found = torch.zeros(x.shape, dtype=torch.float64, device=CUDA)
    for place in range(len(layer.gate_up.values)):
        tokens, places = (chosen == layer.first + place).nonzero(as_tuple=True)
        gate_up, down = (
            each.values[place].double()
            * (1.0 if each.scales is None else each.scales[place, :, None].double())
            for each in (layer.gate_up, layer.down)
        )
        gate, up = (x[tokens].double() @ gate_up.t()).chunk(2, dim=1)
        own = (F.silu(gate) * up) @ down.t()
        found.index_add_(0, tokens, own * shares[tokens, places, None].double())
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def captured(run: Callable[[], Tensor]) -> Tensor:
    """Return the result of a replayed graph of `run`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = run()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "float8", "error"),
    [
        (torch.bfloat16, False, 1e-2),
        (torch.float16, False, 2e-3),
        (torch.float32, False, 1e-5),
        (torch.bfloat16, True, 0.1),
    ],
    ids=["bfloat16", "float16", "float32", "float8"],
)
def test_sums_of_experts(name: str, dtype: torch.dtype, float8: bool, error: float) -> None:
    """Compare one token, few, and prompts, whose products have tiles of other sizes."""
    if float8 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with products of float8")
    shape = SHAPES[name]
    layer = experts(shape, dtype, float8=float8)
    x = normal(COUNTS[-1], HIDDEN, dtype=dtype)
    logits = normal(COUNTS[-1], shape.num_experts, dtype=torch.float32)
    for count in COUNTS:
        found = layer(x[:count], logits[:count])
        assert relative_error(found, exact(layer, x[:count], logits[:count])) < error, count


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rows_sum_is_its_own(name: str, dtype: torch.dtype) -> None:
    """Whatever other rows choose, and wherever it stands."""
    shape = SHAPES[name]
    layer = experts(shape, dtype)
    x = normal(COUNTS[-1], HIDDEN, dtype=dtype)
    logits = normal(COUNTS[-1], shape.num_experts, dtype=dtype)
    whole = layer(x, logits)
    for count in COUNTS[:-1]:
        for first in (0, 7, COUNTS[-1] - count):
            rows = slice(first, first + count)
            assert torch.equal(layer(x[rows], logits[rows]), whole[rows]), (count, first)


def test_all_rows_of_one_expert() -> None:
    """The least even choice has as many tiles as there are programs for."""
    shape = SHAPES["few"]
    layer = experts(shape, torch.bfloat16)
    x = normal(1000, HIDDEN, dtype=torch.bfloat16)
    logits = torch.zeros(1000, 6, device=CUDA)
    logits[:, 2:4] = 9.0
    assert relative_error(layer(x, logits), exact(layer, x, logits)) < 1e-2


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_of_ranks_are_those_of_one(num_ranks: int) -> None:
    shape = SHAPES["30B-A3B"]
    whole = experts(shape, torch.bfloat16)
    each = shape.num_experts // num_ranks
    x, logits = normal(37, HIDDEN, dtype=torch.bfloat16), normal(37, 128, dtype=torch.float32)
    total = torch.zeros(37, HIDDEN, device=CUDA)
    for first in range(0, shape.num_experts, each):
        own = slice(first, first + each)
        matrices = (ExpertMatrix(part.values[own]) for part in (whole.gate_up, whole.down))
        total += GroupedExperts(shape, first, *matrices)(x, logits).float()
    assert relative_error(total, exact(whole, x, logits)) < 1e-2


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("float8", [False, True])
def test_a_replay_follows_the_choice(count: int, float8: bool) -> None:
    """A graph that was captured with one choice of experts computes another one."""
    if float8 and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU with products of float8")
    shape = SHAPES["30B-A3B"]
    layer = experts(shape, torch.bfloat16, float8=float8)
    x = normal(count, HIDDEN, dtype=torch.bfloat16)
    first, second = normal(2, count, shape.num_experts, dtype=torch.float32)
    logits = first.clone()
    found = captured(lambda: layer(x, logits)).clone()
    assert torch.equal(found, layer(x, first))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            out = layer(x, logits)
    logits.copy_(second)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, layer(x, second))
    assert not torch.equal(out, found)
