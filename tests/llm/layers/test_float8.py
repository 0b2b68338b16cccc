"""Float8 matrices: the rounding, products against their definition, independence of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from llm.kernels.rounding import FLOAT8, FLOAT8_MAX, Float8Rows, quantize_rows
from llm.layers.factory import LinearFactory
from llm.layers.linear import BiasedLinear, Float8Linear, RowLinear
from llm.layers.weight import LinearWeight

CPU = torch.device("cpu")
HALF = torch.bfloat16
ROW_COUNTS = (1, 2, 3, 5, 8, 13, 32, 65)

rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 40)),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
).map(torch.from_numpy)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def expanded(found: Float8Rows) -> Tensor:
    return found.values.double() * found.scales.double()[:, None]


@given(rows)
def test_the_rounding(x: Tensor) -> None:
    """A value is at most half a step from its own: of 2^-4 of itself, or of the smallest step."""
    found = quantize_rows(x)
    assert found.values.dtype is FLOAT8
    largest = x.abs().amax(1)
    error = (expanded(found) - x.double()).abs()
    smallest_step = largest.double().clamp(min=1e-12) / FLOAT8_MAX * 2.0**-9
    allowed = torch.maximum(x.double().abs() * 2.0**-4, smallest_step[:, None] / 2)
    assert (error <= allowed * (1 + 1e-5)).all()
    is_large = largest > 1e-12
    assert (found.values.float().abs().amax(1)[is_large] == FLOAT8_MAX).all()
    assert (found.values.float() * x >= 0).all()


@given(rows)
def test_rounded_numbers_stay_what_they_are(x: Tensor) -> None:
    """Also with another scale that is a power of two away; rows near the least scale do not."""
    x = x[x.abs().amax(1) > 1e-10]
    once = quantize_rows(x)
    for other in (once.values.float(), x * 0.25):
        assert torch.equal(quantize_rows(other).values.float(), once.values.float())


def test_rows_that_are_not_finite_stay_in_their_row() -> None:
    layer = RowLinear(LinearWeight(normal(32, 70)), FLOAT8)
    x = normal(6, 70, seed=1)
    whole = layer(x)
    x[2], x[4, 5], x[5, 1] = 0, float("nan"), float("inf")
    found = layer(x)
    assert torch.equal(found[2], torch.zeros(32))
    assert found[4].isnan().all()
    assert not found[5].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


@pytest.mark.parametrize("shape", [(300, 200), (65, 128), (7, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_products_are_those_of_the_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = LinearWeight(normal(*shape)), normal(9, shape[1], seed=1).to(dtype)
    matrix = quantize_rows(weight.values)
    expected = expanded(quantize_rows(x)) @ expanded(matrix).T
    rounding = 1e-6 if dtype is torch.float32 else 4e-3
    for layer in (RowLinear(weight, FLOAT8), Float8Linear(weight, dtype, CPU)):
        found = layer(x)
        assert found.dtype is dtype
        assert (found - expected).norm() / expected.norm() < rounding
    exact = x.double() @ weight.values.double().T
    assert 0.01 < (expected - exact).norm() / exact.norm() < 0.06


@pytest.mark.parametrize("shape", [(1024, 512), (96, 64), (48, 130), (7, 3)])
def test_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, int]) -> None:
    layer = RowLinear(LinearWeight(normal(*shape)), FLOAT8)
    x = normal(80, shape[1], seed=1).to(HALF)
    x *= torch.logspace(-3, 3, 80)[:, None].to(HALF)  # its neighbours have other sizes
    whole = layer(x)
    for count in ROW_COUNTS:
        for start in (0, 7, len(x) - count):
            part = slice(start, start + count)
            assert torch.equal(layer(x[part].clone()), whole[part]), (count, start)


def test_the_factory_leaves_the_head_and_adapters_wide() -> None:
    weight = LinearWeight(normal(32, 48), bias=normal(32))
    x = normal(3, 48, seed=1).to(HALF)
    exact = x.double() @ weight.values.double().T
    for vendor in (False, True):
        factory = LinearFactory(dtype=HALF, device=CPU, int8=False, float8=True, vendor_blas=vendor)
        layer = factory.linear(weight)
        assert isinstance(layer, BiasedLinear)
        assert isinstance(layer.product, Float8Linear if vendor else RowLinear)
        expected = expanded(quantize_rows(x)) @ expanded(quantize_rows(weight.values)).T
        product = (layer(x) - layer.bias).double()
        assert (product - expected).norm() / expected.norm() < 0.01
        for wide in (factory.head(LinearWeight(weight.values)), factory.plain(weight)):
            assert (wide(x) - exact).norm() / exact.norm() < 0.006


def test_stored_matrices_are_not_rounded_again() -> None:
    stored = quantize_rows(normal(8, 16))
    weight = LinearWeight(*stored)
    kept = weight.to_float8(CPU)
    assert torch.equal(kept.values.float(), stored.values.float())
    assert torch.equal(kept.scales, stored.scales)
    int8, scales = weight.to_int8()
    assert int8.dtype is torch.int8
    assert (int8 * scales[:, None] - weight.to_float(torch.float32)).abs().max() <= scales.max() / 2
    both = LinearWeight.stack([weight, weight.rows(torch.tensor([3, 1]))])
    assert both.values.dtype is FLOAT8
    assert torch.equal(both.to_float(torch.float32)[8], weight.to_float(torch.float32)[3])
    mixed = LinearWeight.stack([weight, LinearWeight(int8, scales)])
    assert (mixed.scales, mixed.values.dtype) == (None, torch.float32)
