"""The order of prefill and decode: published traces, first decode, delayed prefill, fairness."""

from __future__ import annotations

import pytest

from llm.batch import ForwardMode
from llm.errors import ConfigError
from llm.request import FinishReason
from llm.scheduler import SchedulerLimits
from tests.llm.scheduler.shadow import Harness, ShadowPipeline, expected_output

CE, TG, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


def harness(num_pages: int = 1000, page_size: int = 16, **limits: object) -> Harness:
    """Return a scheduler with `num_pages` usable pages, without in-flight batching."""
    defaults: dict[str, object] = {"enable_in_flight_batching": False, "max_batch_size": 512}
    pipeline = ShadowPipeline(num_pages + 1, page_size)
    return Harness(SchedulerLimits(**(defaults | limits)), pipeline)  # type: ignore[arg-type]


def endless(**more: object) -> dict[str, object]:
    return {"stop_token_ids": (), "max_tokens": 400} | more


class Trace:
    """Steps a harness and records each batch: type, requests, finished, steps, tokens."""

    def __init__(self, made: Harness) -> None:
        self.lines: list[tuple[ForwardMode, int, int, int, int]] = []
        while made.scheduler.num_live:
            before = made.scheduler.num_live
            batch = made.step()
            finished = before - made.scheduler.num_live
            steps, tokens = batch.num_steps, batch.num_tokens
            self.lines.append((batch.mode, len(batch.rows), finished, steps, tokens))
        made.kv.check_integrity()
        assert made.kv.used_pages == 0

    @property
    def short(self) -> str:
        """Return type and rows of each batch, and ! when all of them finished."""
        names = {CE: "CE", TG: "TG", MIXED: "MX"}
        return " ".join(
            f"{names[mode]}{rows}{'!' * (finished == rows)}"
            for mode, rows, finished, _, _ in self.lines
        )


def traced(num_requests: int, *, prompt_len: int = 500, shared: int = 0, **limits: object) -> Trace:
    """Common part of the traces: prompts of 500, 16 new tokens each, ten steps per turn."""
    options: dict[str, object] = {"enable_chunked_prefill": False, "max_num_steps": 10}
    page_size = 128 if shared else 16
    made = harness(
        2 * num_requests * (prompt_len // page_size + 2), page_size, **(options | limits)
    )
    for index in range(num_requests):
        tail = [1 + (index * 13 + 7 * i * i + index * i) % 63 for i in range(prompt_len - shared)]
        tail[0], tail[1] = 1 + index % 60, 1 + index // 60
        made.add(f"r{index}", [5] * shared + tail, stop_token_ids=(), max_tokens=16)
    return Trace(made)


def test_trace_1_everything_fits() -> None:
    lines = traced(100).lines
    assert lines[:5] == [(CE, 17, 0, 1, 8500)] * 5
    assert lines[5:] == [(CE, 15, 0, 1, 7500), (TG, 100, 0, 10, 100), (TG, 100, 100, 5, 100)]


def test_trace_2_the_batch_cap_bounds_the_decode_set() -> None:
    round_of_32 = "CE17 CE15 TG32 TG32!"
    assert traced(100, max_batch_size=32).short == " ".join([round_of_32] * 3 + ["CE4 TG4 TG4!"])


def test_trace_3_the_queue_cap_lets_more_decode_than_fit_a_batch() -> None:
    trace = traced(100, max_batch_size=32, max_queue_size_tg=999)
    prefill = "CE17 CE17 CE17 CE17 CE17 CE15"
    assert trace.short == f"{prefill} TG32 TG32! TG32 TG32! TG32 TG32! TG4 TG4!"


@pytest.mark.parametrize(
    ("queue", "least", "expected"),
    [
        (None, None, "CE33 CE17 TG50 TG50! CE33 CE17 TG50 TG50! CE28 TG28 TG28!"),
        (50, 50, "CE33 CE17 TG50 TG50! CE33 CE17 TG50 TG50! CE28 TG28 TG28!"),
        (999, 25, "CE33 TG33 TG33! CE33 TG33 TG33! CE33 TG33 TG33! CE29 TG29 TG29!"),
        (999, 50, "CE33 CE33 TG50 TG50! CE33 CE29 TG50 TG50! TG28 TG28!"),
        (999, 75, "CE33 CE33 CE33 TG50 TG50! CE29 TG50 TG50! TG28 TG28!"),
        (999, 999, "CE33 CE33 CE33 CE29 TG50 TG50! TG50 TG50! TG28 TG28!"),
    ],
)
def test_trace_4_a_larger_budget(queue: int | None, least: int | None, expected: str) -> None:
    caps = {"max_queue_size_tg": queue, "min_batch_size_tg": least}
    trace = traced(128, max_batch_size=50, max_batch_input_tokens=16384, **caps)
    assert trace.short == expected


def test_trace_5_a_shared_prefix_is_computed_once() -> None:
    trace = traced(100, shared=384)
    assert trace.lines[:3] == [(CE, 17, 0, 1, 8500), (CE, 71, 0, 1, 71 * 116), (CE, 12, 0, 1, 1392)]
    assert trace.short == "CE17 CE71 CE12 TG100 TG100!"


def test_trace_5_first_decode_follows_each_prefill() -> None:
    trace = traced(100, shared=384, enable_prioritize_first_decode=True)
    assert trace.short == "CE17 TG17 CE71 TG71 CE12 TG12 TG100!"


def test_trace_6_the_length_limit_shortens_the_turn() -> None:
    made = harness(
        600, max_length=2048, enable_chunked_prefill=False, max_num_steps=10, kvcache_ce_watermark=1
    )
    for name in "abc":
        made.add(name, 2040, **endless())
    assert Trace(made).lines == [(CE, 3, 0, 1, 3 * 2040), (TG, 3, 3, 8, 3)]
    assert all(made.reason(name) is FinishReason.LENGTH for name in "abc")
    assert all(len(made.tokens(name)) == 8 for name in "abc")


def test_trace_6_one_near_its_limit_shortens_the_turn_for_all() -> None:
    made = harness(600, max_length=2048, max_num_steps=10, kvcache_ce_watermark=1)
    made.add("near", 2043, **endless())
    made.add("far", 20, **endless(max_tokens=30))
    turns = [(line[0], line[1], line[3]) for line in Trace(made).lines]
    assert turns == [(CE, 2, 1), (TG, 2, 5), (TG, 1, 10), (TG, 1, 10), (TG, 1, 4)]


def test_zero_decodes_until_all_have_ended() -> None:
    trace = traced(40, max_batch_size=20, max_queue_size_tg=40, min_batch_size_tg=0)
    assert trace.short == "CE17 TG17 TG17! CE17 TG17 TG17! CE6 TG6 TG6!"


def test_a_minimum_that_cannot_be_reached_does_not_spin() -> None:
    """A minimum above the decode limit: with the decode set full, prompts cannot be added."""
    trace = traced(12, max_batch_size=4, max_queue_size_tg=4, min_batch_size_tg=99)
    assert trace.short == "CE4 TG4 TG4! CE4 TG4 TG4! CE4 TG4 TG4!"


def test_a_minimum_that_memory_forbids_does_not_spin() -> None:
    made = harness(8, page_size=4, min_batch_size_tg=99, kvcache_ce_watermark=1.0)
    for name in "abc":
        made.add(name, 12, **endless(max_tokens=4))
    made.run_all(30)
    assert all(made.result(name) == expected_output(made.requests[name]) for name in "abc")


@pytest.mark.parametrize("in_flight", [False, True])
def test_the_minimum_keeps_prompts_away(in_flight: bool) -> None:
    made = harness(min_batch_size_tg=2, max_queue_size_tg=8, enable_in_flight_batching=in_flight)
    for name, tokens in (("a", 3), ("b", 6)):
        made.add(name, 4, **endless(max_tokens=tokens))
    made.step()
    made.add("c", 4, **endless(max_tokens=2))
    modes = [made.step().mode for _ in range(3)]
    assert modes == [TG, TG, MIXED if in_flight else CE]  # a has ended: one decodes


# --- first decode


def test_first_decode_takes_only_the_just_prefilled() -> None:
    made = harness(enable_prioritize_first_decode=True)
    made.add("old", 4, **endless())
    for _ in range(3):
        made.step()
    made.add("one token", 4, **endless(max_tokens=1))
    made.add("new", 4, **endless())
    assert made.sizes(made.step()) == [("one token", 4), ("new", 4)]
    assert made.sizes(made.step()) == [("new", 1)]
    assert made.sizes(made.step()) == [("old", 1), ("new", 1)]


def test_first_decode_skips_a_prompt_that_is_not_complete() -> None:
    made = harness(enable_prioritize_first_decode=True, max_batch_input_tokens=512)
    made.add("a", 400, **endless())
    made.add("long", 600, **endless())
    rows = [made.sizes(made.step()) for _ in range(5)]
    assert rows == [
        [("a", 400), ("long", 112)],
        [("a", 1)],
        [("long", 488)],
        [("long", 1)],
        [("a", 1), ("long", 1)],
    ]


def test_first_decode_shortens_the_time_to_a_block_under_load() -> None:
    """Model tokens computed before the sixth token of a request is available, on average."""
    costs = {}
    for first_decode in (False, True):
        made = harness(
            enable_prioritize_first_decode=first_decode,
            max_num_steps=10,
            max_batch_input_tokens=1000,
        )
        names = [f"r{index}" for index in range(40)]
        for name in names:
            made.add(name, 100, **endless(max_tokens=16))
        spent, when = 0, {}
        while len(when) < len(names):
            batch = made.step()
            spent += batch.num_tokens * batch.num_steps
            for name in names:
                if len(made.tokens(name)) >= 6:
                    when.setdefault(name, spent)
        costs[first_decode] = sum(when.values()) / len(names)
    assert costs[True] < 0.75 * costs[False]


@pytest.mark.parametrize("first_decode", [False, True])
def test_first_decode_within_mixed_batches_comes_before_older_rows(first_decode: bool) -> None:
    made = harness(
        max_batch_size=2,
        max_queue_size_tg=4,
        enable_in_flight_batching=True,
        enable_prioritize_first_decode=first_decode,
    )
    made.add("a", 4, **endless(max_tokens=9))
    made.step()
    made.add("b", 4, **endless())
    made.add("c", 4, **endless())
    assert made.sizes(made.step()) == [("a", 1), ("b", 4)]
    assert made.sizes(made.step()) == [("b", 1), ("a", 1)] if first_decode else [("a", 1), ("b", 1)]


# --- a prefill that waits for more prompts


def delayed(**limits: object) -> Harness:
    made = harness(ce_delay_ms=20.0, **limits)
    made.add("a", 4, **endless(max_tokens=9))
    made.now += 0.005 - 0.001  # a request takes the harness a millisecond
    return made


def test_later_arrivals_join_a_delayed_prefill() -> None:
    made = delayed()
    assert not made.step()
    assert made.scheduler.delay_s == pytest.approx(0.015)
    made.add("b", 4, **endless())
    made.now = 0.02
    assert made.sizes(made.step()) == [("a", 4), ("b", 4)]
    assert made.scheduler.delay_s == 0


def test_without_a_delay_each_arrival_is_a_prefill_of_its_own() -> None:
    made = harness(ce_delay_ms=0.0)
    assert made.scheduler.delay_s == 0
    batches = []
    for name in "ab":
        made.add(name, 4, **endless())
        batches.append(made.sizes(made.step()))
    assert batches == [[("a", 4)], [("b", 4)]]


@pytest.mark.parametrize(
    "limits", [{"max_batch_size": 2}, {"max_batch_input_tokens": 8, "max_batch_size": 8}]
)
def test_a_full_prefill_does_not_wait(limits: dict[str, int]) -> None:
    made = delayed(**limits)
    assert not made.step()
    made.add("b", 4, **endless())
    assert made.sizes(made.step()) == [("a", 4), ("b", 4)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_decoding_continues_while_a_prefill_waits(in_flight: bool) -> None:
    made = delayed(enable_in_flight_batching=in_flight)
    made.now = 0.02
    assert made.step().mode is CE
    made.add("b", 4, **endless())
    modes = []
    while CE not in modes and MIXED not in modes:
        modes.append(made.step().mode)
        made.now += 0.004
    assert modes == [TG, TG, TG, TG, MIXED if in_flight else CE]


def test_prompt_remainders_and_preempted_sequences_do_not_wait() -> None:
    made = delayed(max_batch_input_tokens=8, max_batch_size=8)
    made.add("long", 20, **endless())
    assert [made.sizes(made.step()) for _ in range(3)] == [
        [("a", 4), ("long", 4)],
        [("long", 8)],
        [("long", 8)],
    ]


def test_the_rest_of_a_prompt_does_not_wait_for_a_batch_that_is_no_longer_full() -> None:
    made = harness(ce_delay_ms=1000.0, max_batch_input_tokens=10, max_batch_size=4)
    for name in "ab":
        made.add(name, 6, **endless())
    assert made.sizes(made.step()) == [("a", 6), ("b", 4)]
    assert made.sizes(made.step()) == [("b", 2)]


def test_an_urgent_arrival_does_not_make_the_others_wait_longer() -> None:
    made = delayed()
    assert not made.step()
    made.now = 0.01
    made.add("urgent", 4, priority=1, **endless())
    assert not made.step()
    made.now = 0.02
    assert made.sizes(made.step()) == [("urgent", 4), ("a", 4)]


def test_a_prefill_is_full_when_no_more_may_decode() -> None:
    made = delayed(max_batch_size=8, max_queue_size_tg=2)
    made.now = 0.02
    assert made.step().mode is CE
    made.add("b", 4, **endless())
    assert made.sizes(made.step()) == [("b", 4)]


def test_the_delay_starts_again_for_each_prefill() -> None:
    made = delayed()
    made.now = 0.02
    made.step()
    made.now = 1.0
    made.add("b", 4, **endless(max_tokens=1))
    made.scheduler.pause("a")
    assert not made.step()
    made.take(made.scheduler.cancel("b"))
    assert not made.step()
    assert made.scheduler.delay_s == 0, "no prefill waits"
    made.now = 2.0
    made.add("c", 4, **endless(max_tokens=1))
    assert not made.step()
    made.now = 2.02
    assert made.sizes(made.step()) == [("c", 4)]


def test_requests_of_one_token_do_not_starve_decoding_sequences() -> None:
    """They never fill the decode set, so that prompts alone would run forever."""
    made = harness(max_batch_size=4)
    made.add("patient", 4, **endless(max_tokens=5))
    made.step()
    for index in range(200):
        for name in "ab":
            made.add(f"{name}{index}", 4, **endless(max_tokens=1))
        made.step()
        if made.reason("patient"):
            break
    assert made.reason("patient") is FinishReason.LENGTH
    assert index < 4 * 4, "one turn of decoding for every four prompts, in twos or more"


def test_a_turn_of_decoding_follows_as_many_prompts_as_may_decode() -> None:
    made = harness(max_batch_size=1, max_queue_size_tg=3)
    made.add("patient", 4, **endless())
    for index in range(6):
        made.add(f"r{index}", 4, **endless(max_tokens=1))
    assert [made.step().mode for _ in range(8)] == [CE, CE, CE, TG, CE, CE, CE, TG]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_batch_size_tg": -1}, "min_batch_size_tg=-1 must be ≥ 0"),
        ({"ce_delay_ms": -1.0}, "ce_delay_ms must be ≥ 0"),
    ],
)
def test_negative_limits_are_errors(limits: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness(**limits)
