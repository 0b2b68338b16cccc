"""Built-in kernels at real sizes: close to float64, the same bits in graphs and at any launch
level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import KVSlots
from llm.kv_cache.kv_pool import KVPool
from llm.layers.decoder import HeadNorm, RMSNorm, Rotary, rotate_
from llm.layers.rotary import RotaryConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EPSILON = 1e-5
TOLERANCE = 4e-3  # relative: bfloat16 results have 8 bits


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def normalised(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).sum(1, keepdim=True) + EPSILON) * gain.double()


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


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(3072, 2048), (2048, 8192), (5120, 3072), (151, 896)]
)
def test_a_product(rows: int, num_out: int, num_in: int) -> None:
    from llm.kernels.blocks import Blocks
    from llm.kernels.products import product

    x, gain = normal(rows, num_in), normal(num_in)
    weight, bias = normal(num_out, num_in, scale=num_in**-0.5), normal(num_out)
    expected = normalised(x, gain) @ weight.double().t() + bias.double()
    for blocks in (Blocks(4, 1024, 4), Blocks(2, 512, 8, 132)):

        def run(level: int, blocks: Blocks = blocks) -> Tensor:
            out = torch.empty(rows, num_out, device="cuda")
            product(x, weight, out, blocks, gain=gain, epsilon=EPSILON, bias=bias, level=level)
            return out

        found = run(0)
        assert relative_error(found, expected) < 1e-5
        assert all(torch.equal(run(level), found) for level in (1, 2))
        assert torch.equal(captured(lambda: run(2)), found)


@pytest.mark.parametrize("rows", [1, 4])
def test_products_that_add_and_that_gate(rows: int) -> None:
    from llm.kernels.blocks import Blocks
    from llm.kernels.products import gated_product, product

    x, weight, old = normal(rows, 3072), normal(2 * 512, 3072, scale=0.02), normal(rows, 1024)
    expected = x.double() @ weight.double().t()
    for level in (0, 2):
        out = old.clone()
        product(x, weight, out, Blocks(4, 1024, 8), adds=True, level=level)
        assert relative_error(out, old.double() + expected) < TOLERANCE
        gated = gated_product(x, weight, Blocks(2, 1024, 4, 132), level=level)
        gate, up = expected.chunk(2, dim=1)
        assert relative_error(gated, F.silu(gate) * up) < TOLERANCE


@pytest.mark.parametrize("size", [64, 96, 128])
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("has_gain", [False, True])
def test_heads_on_their_way_to_the_pool(size: int, rows: int, has_gain: bool) -> None:
    from llm.kernels.heads import rotate_heads

    heads, kv_heads = 24, 8
    projected = normal(rows, heads + 2 * kv_heads, size)
    norm = HeadNorm(torch.randn(heads + kv_heads, size, device="cuda"), 1e-6) if has_gain else None
    rotary = Rotary(RotaryConfig(size), 4096, torch.device("cuda"))
    rotations = rotary.at(torch.randint(0, 4096, (rows,), device="cuda"))
    expected = projected.clone()
    if norm is not None:
        norm(expected[:, : heads + kv_heads])
    rotate_(expected[:, : heads + kv_heads], rotations)
    pool, counterpart = (
        KVPool(1, 40, 16, kv_heads, size, torch.bfloat16, "cuda") for _ in range(2)
    )
    slots = torch.randperm(640, device="cuda")[:rows]
    counterpart.write(0, slots, expected[:, heads:].view(rows, 2, kv_heads, size))
    for level in (0, 1, 2):
        found = projected.clone()
        rotate_heads(
            found,
            rotations,
            KVSlots(pool.keys(0), pool.values(0), slots),
            num_heads=heads,
            gain=None if norm is None else norm.gain,
            epsilon=0.0 if norm is None else norm.epsilon,
            level=level,
        )
        assert relative_error(found[:, :heads], expected[:, :heads].double()) < TOLERANCE
        assert relative_error(pool.storage[0], counterpart.storage[0].double()) < TOLERANCE
        pool.storage[0].zero_()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "hidden"), [(32, 8, 64, 2048), (24, 8, 128, 3072)]
)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_projected_heads(heads: int, kv_heads: int, size: int, hidden: int, rows: int) -> None:
    from llm.kernels.blocks import Blocks
    from llm.kernels.projections import project_heads

    x, norm = normal(rows, hidden), RMSNorm(normal(hidden), 1e-5)
    weight = normal((heads + 2 * kv_heads) * size, hidden, scale=hidden**-0.5)
    rotary = Rotary(RotaryConfig(size), 4096, torch.device("cuda"))
    rotations = rotary.at(torch.randint(0, 4096, (rows,), device="cuda"))
    expected = F.linear(norm(x), weight).view(rows, -1, size)
    rotate_(expected[:, : heads + kv_heads], rotations)
    pool, counterpart = (KVPool(1, 4, 16, kv_heads, size, torch.bfloat16, "cuda") for _ in range(2))
    slots = torch.randperm(64, device="cuda")[:rows]
    counterpart.write(0, slots, expected[:, heads:].view(rows, 2, kv_heads, size))
    target = KVSlots(pool.keys(0), pool.values(0), slots)

    def run(level: int) -> Tensor:
        return project_heads(
            x,
            weight,
            rotations,
            target,
            Blocks(4, 1024, 4, 264),
            gain=norm.gain,
            epsilon=norm.epsilon,
            num_heads=heads,
            level=level,
        )

    query = run(0)
    assert relative_error(query, expected[:, :heads].double()) < 2 * TOLERANCE
    assert relative_error(pool.storage[0], counterpart.storage[0].double()) < 2 * TOLERANCE
    stored = pool.storage[0].clone()
    assert all(torch.equal(run(level), query) for level in (1, 2))
    assert torch.equal(pool.storage[0], stored)
    assert torch.equal(captured(lambda: run(2)), query)


def test_norm_and_gate() -> None:
    from llm.kernels.elementwise import gate, normalise

    for size in (896, 2048, 3072):
        x, gain = normal(37, size), normal(size)
        for level in (0, 1, 2):
            found = normalise(x, gain, EPSILON, level=level)
            assert relative_error(found, normalised(x, gain)) < TOLERANCE
            left, right = x.double().chunk(2, dim=1)
            assert relative_error(gate(x, level=level), F.silu(left) * right) < TOLERANCE


@pytest.mark.parametrize("rows", [3, 17, 64, 128])
@pytest.mark.parametrize(("num_out", "num_in"), [(4096, 1024), (1024, 3072), (151, 896)])
def test_split_products(rows: int, num_out: int, num_in: int) -> None:
    """With the tiles of such a matrix: close to float64, at every level the same, in a graph."""
    from llm.kernels.split_products import multiply_gated, multiply_split
    from llm.kernels.tuning import split_tiles

    x, weight = normal(rows, num_in), normal(2 * num_out, num_in, scale=num_in**-0.5)
    expected = x.double() @ weight.double().t()
    tiles = split_tiles(2 * num_out, num_in, rows)
    found = multiply_split(x, weight, tiles)
    assert relative_error(found.sum(0), expected) < 1e-5
    in_turn = multiply_split(x, weight, replace(tiles, slots=0))  # `_split_kernel`
    assert relative_error(found, in_turn.double()) < 1e-5
    gate_tiles = split_tiles(num_out, num_in, rows, parts=2)
    gated = multiply_gated(x, weight, gate_tiles)
    left, right = expected.chunk(2, dim=1)
    assert relative_error(gated, F.silu(left) * right) < TOLERANCE
    in_turn = multiply_gated(x, weight, replace(gate_tiles, slots=0))
    assert relative_error(gated, in_turn.double()) < TOLERANCE
    for level in (1, 2):
        assert torch.equal(multiply_split(x, weight, tiles, level=level), found)
        assert torch.equal(multiply_gated(x, weight, gate_tiles, level=level), gated)
    assert torch.equal(captured(lambda: multiply_split(x, weight, tiles, level=2)), found)


@pytest.mark.parametrize("rows", [7, 37])
@pytest.mark.parametrize("parts", [1, 8])
def test_rows_are_added_and_normalised(parts: int, rows: int) -> None:
    from llm.kernels.split_products import add_normalised

    x, gain = normal(rows, 1024), normal(1024)
    sums = torch.randn(parts, rows, 1024, device="cuda")
    expected = x.double() + sums.double().sum(0)
    for level in (0, 1, 2):
        added = x.clone()
        found = add_normalised(added, sums, gain, EPSILON, added, level=level)
        assert relative_error(added, expected) < TOLERANCE
        assert relative_error(found, normalised(added, gain)) < TOLERANCE
