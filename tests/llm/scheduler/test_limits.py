"""Limits of a batch: defaults, errors, and budgets."""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from llm.errors import ConfigError
from llm.scheduler import SchedulerLimits
from llm.scheduler.limits import ResolvedLimits
from llm.scheduler.planner import BudgetDecision, TokenBudget

AVAILABLE, REACHED, EXHAUSTED = (
    BudgetDecision.AVAILABLE,
    BudgetDecision.REACHED,
    BudgetDecision.EXHAUSTED,
)


def resolved(**values: Any) -> ResolvedLimits:
    return ResolvedLimits.create(SchedulerLimits(**values))


def budget(capacity: int, context: int | None = None, *, chunked: bool = True) -> TokenBudget:
    """Return a budget of pages of 4 tokens."""
    limits = resolved(
        max_batch_size=1,
        max_batch_input_tokens=capacity,
        max_batch_total_tokens=context,
        enable_chunked_prefill=chunked,
    )
    return TokenBudget(limits, page_size=4)


def test_gaps_are_filled() -> None:
    assert resolved() == ResolvedLimits(
        max_length=sys.maxsize,
        max_batch_size=32,
        max_decoding=32,
        min_decoding=32,
        prefill_delay_s=0.0,
        first_decode=False,
        max_input_tokens=8192,
        max_total_tokens=None,
        chunked_prefill=True,
        in_flight_batching=True,
        watermark=0.95,
        max_num_steps=1,
        max_adapters=None,
    )


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"max_batch_input_tokens": 8}, "max_batch_size", 8),
        ({"max_batch_size": 5}, "max_decoding", 5),
        ({"max_batch_size": 5, "max_queue_size_tg": 7}, "max_decoding", 7),
        ({"max_batch_size": 5, "max_queue_size_tg": 7}, "min_decoding", 7),
        ({"min_batch_size_tg": 0}, "min_decoding", 0),
        ({"ce_delay_ms": 5.0}, "prefill_delay_s", 0.005),
        ({"max_num_steps": -1}, "max_num_steps", 1),
        ({"max_num_steps": 3}, "max_num_steps", 3),
    ],
)
def test_one_limit_follows_another(given: dict[str, Any], name: str, expected: float) -> None:
    assert getattr(resolved(**given), name) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"max_batch_size": 1, "max_batch_input_tokens": 1},
        {"max_batch_size": 8, "max_batch_input_tokens": 8},
        {"kvcache_ce_watermark": 1.0},
        {"kvcache_ce_watermark": 0.001},
        {"min_batch_size_tg": 0},
        {"ce_delay_ms": 0.0},
        {"max_length": 2},
    ],
)
def test_a_limit_itself_is_taken(given: dict[str, Any]) -> None:
    assert resolved(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0 must be ≥ 1"),
        ({"max_batch_size": 9, "max_batch_input_tokens": 8}, "max_batch_input_tokens=8 must be"),
        ({"kvcache_ce_watermark": 0.0}, "kvcache_ce_watermark=0.0 must be in (0, 1]"),
        ({"kvcache_ce_watermark": 1.01}, "kvcache_ce_watermark=1.01 must be in (0, 1]"),
        ({"min_batch_size_tg": -1}, "min_batch_size_tg=-1 must be ≥ 0"),
        ({"ce_delay_ms": -0.5}, "ce_delay_ms must be ≥ 0"),
        ({"max_length": 1}, "max_length=1 leaves no room to generate"),
    ],
)
def test_beyond_a_limit_is_an_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("limits", [SchedulerLimits(), resolved()])
def test_limits_are_frozen(limits: Any) -> None:
    with pytest.raises(FrozenInstanceError):
        limits.max_length = 3


def test_the_active_budget_is_reached_by_what_fills_it() -> None:
    made = budget(8, 100)
    assert [made.decide(n, n) for n in (7, 8, 9)] == [AVAILABLE, REACHED, REACHED]
    assert made.take(3, 3) == 3
    assert [made.decide(n, n) for n in (4, 5, 6)] == [AVAILABLE, REACHED, REACHED]
    assert made.take(9, 9) == 5
    assert (made.active_tokens, made.context_tokens) == (8, 4 + 12)
    assert made.decide(1, 1) is EXHAUSTED
    assert repr(made) == "TokenBudget(8/8 active, 16/100 context)"


def test_without_chunks_the_last_prompt_is_whole() -> None:
    made = budget(8, chunked=False)
    assert made.take(20, 20) == 20
    assert (made.active_tokens, made.decide(1, 1)) == (20, EXHAUSTED)
    assert repr(made) == "TokenBudget(20/8 active, 0/∞ context)"


def test_the_context_budget_counts_pages() -> None:
    made = budget(100, 16)
    assert [made.decide(1, n) for n in (12, 13, 16, 17)] == [
        AVAILABLE, REACHED, REACHED, EXHAUSTED,
    ]  # fmt: skip
    made.active_tokens, made.context_tokens = 2, 8  # of two rows that decode
    assert [made.decide(1, n) for n in (4, 8, 9)] == [AVAILABLE, REACHED, EXHAUSTED]
    assert [made.decide(98, n) for n in (4, 8, 9)] == [REACHED, REACHED, EXHAUSTED]
    assert repr(made) == "TokenBudget(2/100 active, 8/16 context)"


def test_a_context_that_only_exceeds_the_budget_by_rounding_may_run_alone() -> None:
    made = budget(100, 18)
    assert [made.decide(1, n) for n in (16, 18, 19)] == [AVAILABLE, REACHED, EXHAUSTED]
    made.active_tokens = 1
    assert made.decide(1, 18) is EXHAUSTED
