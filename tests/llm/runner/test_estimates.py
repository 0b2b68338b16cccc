"""The memory plan's estimate of a step against its real use; a full pool is not an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.llm.runner.largest_prefill import largest_prefill
from tests.llm.runner.peak_memory import MAX_ROWS, MODELS, SLACK, TOKENS, create_runner

SHORT = 512  # tokens of most cases: measuring costs seconds for longer prompts
CASES = [*((model, rows, SHORT) for model in MODELS for rows in (1, MAX_ROWS)), ("wide", 1, TOKENS)]


@pytest.mark.parametrize(("model", "num_rows", "tokens"), CASES)
def test_the_largest_prefill_takes_no_more_than_was_planned(
    tmp_path: Path, model: str, num_rows: int, tokens: int
) -> None:
    runner = create_runner(tmp_path, model, tokens)
    runner.initialize()
    peak = largest_prefill(runner, num_rows)
    assert (peak.num_rows, peak.num_tokens) == (num_rows, tokens)
    assert 0 < peak.ratio <= SLACK, str(peak)
