"""Kernels in Triton's interpreter; tests/gpu runs them on a device."""

from __future__ import annotations

import pytest

from tests.interpreted import Ended

pytest.importorskip("triton", reason="torch brings Triton where there may be a GPU")
MODULE = "tests.llm.kernels.interpreted_kernels"


@pytest.mark.interpreted(MODULE, "sampling", "3", "4")
def test_random_rows(interpreted: Ended) -> None:
    check(interpreted)


@pytest.mark.interpreted(MODULE, "sampling", "1", "5")
def test_other_random_rows(interpreted: Ended) -> None:
    check(interpreted)


@pytest.mark.interpreted(MODULE, "cuts")
def test_cuts(interpreted: Ended) -> None:
    check(interpreted)


@pytest.mark.interpreted(MODULE, "products")
def test_products(interpreted: Ended) -> None:
    check(interpreted)


def check(ended: Ended) -> None:
    """Check that the kernels compute the same as their references."""
    assert (ended.output, ended.status) == ("equal\n", 0), ended.errors[-3000:]
