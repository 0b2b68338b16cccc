"""Kernels in Triton's interpreter; tests/gpu runs them on a device."""

from __future__ import annotations

import pytest

from tests.interpreted import Ended

pytest.importorskip("triton", reason="torch brings Triton where there may be a GPU")
MODULE = "tests.llm.kernels.interpreted_kernels"


@pytest.mark.interpreted(MODULE)
def test_kernels_equal_their_references(interpreted: Ended) -> None:
    ended = interpreted
    assert (ended.output, ended.status) == ("equal\n", 0), ended.errors[-3000:]
