"""The memory plan's estimate of a step against its real use; a full pool is not an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow
from llm.request import SamplingParams
from llm.sampling.device.sampler import MAX_WINDOW, sampler_bytes
from tests.llm.runner.largest_prefill import largest_prefill, peak_on_cpu
from tests.llm.runner.peak_memory import (
    MAX_ROWS,
    MODELS,
    PAGE_SIZE,
    SLACK,
    create_runner,
)

SHORT, LONG = 256, 1024  # tokens of most cases, and of one: measuring costs seconds for more
CASES = [*((model, rows, SHORT) for model in MODELS for rows in (1, MAX_ROWS)), ("wide", 1, LONG)]


@pytest.mark.parametrize(("model", "num_rows", "tokens"), CASES)
def test_the_largest_prefill_takes_no_more_than_was_planned(
    tmp_path: Path, model: str, num_rows: int, tokens: int
) -> None:
    runner = create_runner(tmp_path, model, tokens)
    runner.initialize()
    peak = largest_prefill(runner, num_rows)
    assert (peak.num_rows, peak.num_tokens) == (num_rows, tokens)
    assert 0 < peak.ratio <= SLACK, str(peak)


def test_copies_of_contexts_are_planned(tmp_path: Path) -> None:
    """On a CPU, where the pages of all rows are scattered; the rows share them here."""
    runner = create_runner(tmp_path, "wide", SHORT)
    runner.initialize()
    pages = tuple(range(SHORT // PAGE_SIZE, 0, -1))
    rows = tuple(
        ScheduledRow(f"row-{n}", (0,), SHORT - 1, pages, True, True, SamplingParams())
        for n in range(MAX_ROWS)
    )
    step = ScheduledBatch(rows, ForwardMode.DECODE)
    taken = peak_on_cpu(lambda: runner.forward(runner.prepare(step)))
    planned, copies = runner.activation_bytes(MAX_ROWS), runner.attention_bytes(MAX_ROWS)
    assert copies / 2 < taken <= planned, f"{taken / 1e6:.1f} of {planned / 1e6:.1f} MB"


def test_histories_take_memory_only_where_penalties_are_accepted(tmp_path: Path) -> None:
    taken = {}
    for are_accepted in (True, False):
        sampling = {"enable_penalties": are_accepted}
        runner = create_runner(tmp_path, "large vocabulary", SHORT, sampling=sampling)
        runner.initialize()
        taken[are_accepted] = peak_on_cpu(runner.sample_on_device)
    vocabulary = runner.vocab_size
    histories = (MAX_ROWS - 1) * (2 * vocabulary + 4 * MAX_WINDOW)
    assert taken[True] - taken[False] == histories
    assert sampler_bytes(vocabulary, MAX_ROWS) - sampler_bytes(vocabulary, MAX_ROWS, 1) == histories
