"""Fairness: under an endless load each request has its turn after a bounded time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.scheduler import SchedulerLimits
from llm.scheduler.table import PRIORITY_AGEING_S
from tests.llm.scheduler.shadow import Harness, ShadowPipeline, expected_output
from tests.llm.scheduler.test_storm import MAX_LENGTH, limits


def endless(**more: object) -> dict[str, object]:
    return {"stop_token_ids": (), "max_tokens": 4} | more


class BackgroundLoad:
    """Requests that keep arriving, as many as fit and two that wait."""

    def __init__(self, made: Harness, *, priority: int = 0, **request: int) -> None:
        self.made = made
        self._priority = priority
        self._length = request.get("length", 4)
        self._max_tokens = request.get("max_tokens", 3)
        self._numbers = itertools.count()

    def step(self) -> None:
        """Run one turn of a second; add background requests first."""
        made = self.made
        while made.scheduler.num_waiting < 3:
            made.add(
                f"crowd {next(self._numbers)}",
                self._length,
                priority=self._priority,
                **endless(max_tokens=self._max_tokens),
            )
        made.now += 1.0
        made.step()

    def until_done(self, name: str, most: int) -> int:
        """Return the number of turns until a request has ended."""
        for turn in range(most):
            if self.made.reason(name) is not None:
                return turn
            self.step()
        raise AssertionError(f"{name} has not ended after {most} turns: {self.made.scheduler!r}")


def harness(num_pages: int = 40, **values: object) -> Harness:
    defaults: dict[str, object] = {"max_batch_size": 4, "max_batch_input_tokens": 16}
    made = SchedulerLimits(**(defaults | values))  # type: ignore[arg-type]
    return Harness(made, ShadowPipeline(num_pages + 1, 4))


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("first_decode", [False, True])
def test_small_prompts_do_not_keep_a_large_one_out(in_flight: bool, first_decode: bool) -> None:
    """The watermark delays it until others have ended; no request of its priority overtakes it."""
    made = harness(
        20,
        enable_in_flight_batching=in_flight,
        enable_prioritize_first_decode=first_decode,
        kvcache_ce_watermark=0.9,
    )
    background = BackgroundLoad(made, max_tokens=9)
    for _ in range(5):
        background.step()
    made.add("large", 70, **endless())  # 18 of 20 pages
    assert background.until_done("large", 60) > 0
    assert made.result("large") == expected_output(made.requests["large"])


@pytest.mark.parametrize("levels", [1, 3])
def test_waiting_is_worth_as_much_as_priority(levels: int) -> None:
    made = harness(max_batch_size=1)
    background = BackgroundLoad(made, priority=levels, max_tokens=1)
    background.step()
    made.add("patient", 4, **endless())
    waited = background.until_done("patient", 100)
    assert waited >= levels * PRIORITY_AGEING_S - 1
    assert waited <= levels * PRIORITY_AGEING_S + 4 * 2 + 3


@pytest.mark.parametrize("least", [0, 1, 99])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_decoding_sequences_have_their_turn(least: int, max_tokens: int) -> None:
    """Without in-flight batching, with an endless supply of prompts, short or long lived."""
    made = harness(
        min_batch_size_tg=least,
        enable_in_flight_batching=False,
        enable_prioritize_first_decode=True,
        max_queue_size_tg=8,
    )
    made.add("patient", 4, **endless(max_tokens=12))
    made.step()
    assert BackgroundLoad(made, max_tokens=max_tokens).until_done("patient", 12 * 10) > 0


def test_rows_beyond_the_batch_have_their_turn() -> None:
    """More decoding sequences than fit a batch: the later ones run when the first have ended."""
    made = harness(max_batch_size=2, max_queue_size_tg=6, min_batch_size_tg=1)
    background = BackgroundLoad(made, max_tokens=5)
    for _ in range(6):
        background.step()
    made.add("last", 4, **endless())
    assert background.until_done("last", 60) > 0


@settings(max_examples=120)
@given(
    values=limits(),
    background_priority=st.integers(-1, 2),
    length=st.integers(1, 14),
    background_tokens=st.integers(1, 8),
    prompt=st.integers(1, 24),
    num_slots=st.sampled_from([0, 6]),
)
def test_no_request_starves_for_any_limits(
    values: SchedulerLimits,
    background_priority: int,
    length: int,
    background_tokens: int,
    prompt: int,
    num_slots: int,
) -> None:
    made = Harness(values, ShadowPipeline(13, 4, num_slots=num_slots))
    background = BackgroundLoad(
        made, priority=background_priority, length=length, max_tokens=background_tokens
    )
    for _ in range(4):
        background.step()
    request = made.add("patient", prompt, **endless(max_tokens=6))
    background.until_done("patient", 500)
    assert made.result("patient") == expected_output(request, MAX_LENGTH)
