"""The memory plan on a CUDA device: as tests/llm/test_estimates.py, measured by its allocator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.llm.peak_memory import MODELS, NUMS_OF_ROWS, SLACK, peak_and_estimate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("num_rows", NUMS_OF_ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_the_largest_prefill_takes_no_more_than_was_planned(
    tmp_path: Path, model: str, num_rows: int
) -> None:
    peak, estimate = peak_and_estimate(tmp_path, model, num_rows, "cuda:0")
    assert 0 < peak <= SLACK * estimate, f"{peak / estimate:.2f} of the estimate"
