"""The memory plan's estimate of a step against its real use; a full pool is not an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.llm.runner.peak_memory import MODELS, NUMS_OF_ROWS, SLACK, TOKENS, measured


@pytest.mark.parametrize("num_rows", NUMS_OF_ROWS)
@pytest.mark.parametrize("model", MODELS)
def test_the_largest_prefill_takes_no_more_than_was_planned(
    tmp_path: Path, model: str, num_rows: int
) -> None:
    peak = measured(tmp_path, model, num_rows)
    assert (peak.num_rows, peak.num_tokens) == (num_rows, TOKENS)
    assert 0 < peak.ratio <= SLACK, str(peak)
