"""Scheduler: the text rule, budgets, watermark and preemption, by worked examples."""

from __future__ import annotations

import logging

import pytest

from llm.batch import ForwardMode, ScheduledBatch, ScheduledRow, StepOutput
from llm.errors import ConfigError
from llm.request import FinishReason
from llm.scheduler import Scheduler, SchedulerLimits
from tests.llm.scheduler.shadow import Harness, ShadowPipeline, expected_output

CE, TG, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED


def harness(num_pages: int = 1000, page_size: int = 16, **limits: object) -> Harness:
    """Return a scheduler with `num_pages` usable pages; text rule without in-flight batching."""
    defaults: dict[str, object] = {"enable_in_flight_batching": False, "max_batch_size": 512}
    pipeline = ShadowPipeline(num_pages + 1, page_size)
    return Harness(SchedulerLimits(**(defaults | limits)), pipeline)  # type: ignore[arg-type]


def endless(**more: object) -> dict[str, object]:
    return {"stop_token_ids": (), "max_tokens": 400} | more


PROMPTS = {"a": 5000, "b": 5000, "c": 5000, "d": 100}


def test_chunked_prefill_fills_the_budget_exactly() -> None:
    made = harness(2000)
    for name, length in PROMPTS.items():
        made.add(name, length, max_tokens=1)
    assert made.sizes(made.step()) == [("a", 5000), ("b", 3192)]
    assert made.sizes(made.step()) == [("b", 1808), ("c", 5000), ("d", 100)]


def test_without_chunking_the_budget_is_soft() -> None:
    made = harness(2000, enable_chunked_prefill=False)
    for name, length in PROMPTS.items():
        made.add(name, length, max_tokens=1)
    assert [made.step().num_tokens, made.step().num_tokens] == [10000, 5100]


def test_a_long_prompt_in_chunks_yields_its_first_token_after_the_last() -> None:
    made = harness(2000)
    request = made.add("long", 20_000, max_tokens=2)
    for num_tokens, samples in ((8192, False), (8192, False), (3616, True)):
        assert not made.chunks["long"]
        batch = made.step()
        assert made.sizes(batch) == [("long", num_tokens)]
        assert batch.rows[0].samples is samples
        assert len(made.kv.pages("long")) == 1250, "the whole prompt's pages are reserved"
    made.run_all()
    assert made.result("long") == expected_output(request)


def test_a_decode_row_has_the_fields_of_its_sequence() -> None:
    made = harness()
    request = made.add("a", 20, **endless())
    made.step()
    first = made.tokens("a")[-1]
    (row,) = made.step().rows
    assert row == ScheduledRow(
        request_id="a",
        token_ids=(first,),
        start=20,
        pages=made.kv.pages("a"),
        is_extend=False,
        samples=True,
        sampling=request.sampling,
        output_ids=made.tokens("a"),
        lora="",
        embeds=False,
    )


def test_in_flight_batches_decode_during_a_long_prefill() -> None:
    made = harness(
        enable_in_flight_batching=True, max_batch_input_tokens=512, kvcache_ce_watermark=1
    )
    names = [f"r{index}" for index in range(32)]
    for name in names:
        made.add(name, 8, **endless())
    made.step()
    made.add("long", 2000, **endless())
    for tokens in (480, 480, 480, 480, 80):
        batch = made.step()
        assert batch.mode is MIXED
        assert made.sizes(batch) == [(name, 1) for name in names] + [("long", tokens)]
    assert all(len(made.tokens(name)) == 6 for name in names)
    assert made.step().mode is TG


def test_without_in_flight_batching_prompts_come_first() -> None:
    made = harness(max_batch_input_tokens=512)
    made.add("a", 8, **endless())
    made.step()
    made.add("long", 1000, **endless())
    assert [made.step().mode for _ in range(3)] == [CE, CE, TG]


def test_the_context_budget_counts_whole_pages() -> None:
    made = harness(page_size=128, max_batch_total_tokens=2048)
    for name in "abc":
        made.add(name, 1000, **endless())
    assert made.sizes(made.step()) == [("a", 1000), ("b", 1000)]
    assert made.sizes(made.step()) == [("c", 1000)]  # decode rows do not count without prompts
    assert len(made.step().rows) == 3


def test_the_context_budget_counts_decode_rows_of_mixed_batches() -> None:
    made = harness(page_size=128, max_batch_total_tokens=2048, enable_in_flight_batching=True)
    for name in "abc":
        made.add(name, 1000, **endless(max_tokens=5))
    modes = [made.step().mode for _ in range(6)]
    assert modes == [CE, TG, TG, TG, TG, CE]


def test_a_context_that_only_rounding_makes_too_long_runs_alone() -> None:
    made = harness(page_size=128, max_batch_total_tokens=1000)
    made.add("a", 990, max_tokens=2)
    made.add("b", 10, max_tokens=2)
    made.run_all(10)
    assert made.reason("a") is not FinishReason.ERROR


def test_a_context_beyond_the_budget_fails_alone() -> None:
    made = harness(max_batch_total_tokens=100)
    made.add("a", 101, max_tokens=2)
    made.add("b", 10, max_tokens=2)
    made.run_all(10)
    assert made.reason("a") is FinishReason.ERROR
    assert "max_batch_total_tokens=100" in made.chunks["a"][-1].error
    assert made.reason("b") is not FinishReason.ERROR


@pytest.mark.parametrize(
    ("needed", "in_flight", "mode"),
    [(15, True, MIXED), (16, True, TG), (15, False, CE), (16, False, TG)],
)
def test_the_watermark_defers_prompts(needed: int, in_flight: bool, mode: ForwardMode) -> None:
    made = harness(100, page_size=4, enable_in_flight_batching=in_flight)
    made.add("running", 80 * 4 - 2, **endless())
    made.step()
    made.add("new", needed * 4, **endless())
    assert made.step().mode is mode


def test_the_watermark_does_not_apply_without_active_sequences() -> None:
    made = harness(100, page_size=4)
    made.add("big", 400, max_tokens=1)
    assert made.sizes(made.step()) == [("big", 400)]


def decoding_abc(max_tokens: int, num_pages: int = 7, **limits: object) -> Harness:
    """A, B, C decode in entry order, hold two pages each, and need a third for the next token."""
    made = harness(num_pages, page_size=4, kvcache_ce_watermark=1.0, **limits)
    for name in "abc":
        made.add(name, 8, **endless(max_tokens=max_tokens))
    made.step()
    assert (made.kv.used_pages, made.kv.total_pages) == (6, num_pages)
    return made


@pytest.mark.parametrize("num_pages", [6, 7])
@pytest.mark.parametrize("in_flight", [False, True])
def test_the_youngest_gives_its_pages(num_pages: int, in_flight: bool) -> None:
    """A takes the free page (or one of C's), B one of C's; C goes to the front of pending."""
    made = decoding_abc(5, num_pages, enable_in_flight_batching=in_flight)
    made.add("d", 5, **endless(max_tokens=3))
    made.scheduler.pause("d")  # so that the next turn decodes, with and without in-flight batching
    batch = made.step()
    assert batch.mode is TG
    assert made.sizes(batch) == [("a", 1), ("b", 1)]
    assert made.scheduler.num_preemptions == 1
    made.scheduler.resume("d")
    rest = made.run_all()
    assert [r.request_id for b in rest for r in b.rows if r.is_extend] == ["c", "d"]
    assert made.scheduler.num_preemptions == 1, "no ping-pong"
    for name in "abcd":
        assert made.result(name) == expected_output(made.requests[name])


def test_a_half_prefilled_prompt_gives_its_pages_before_a_stream_does() -> None:
    made = harness(
        10,
        page_size=4,
        kvcache_ce_watermark=1.0,
        max_batch_size=4,
        max_batch_input_tokens=4,
        enable_in_flight_batching=True,
    )
    made.add("stream", 4, **endless(max_tokens=10))
    made.step()
    made.add("long", 32, **endless(max_tokens=1))
    made.step()  # takes the last page
    assert made.kv.available_pages == 0
    made.run_all()
    assert made.scheduler.num_preemptions == 1
    for name in ("stream", "long"):
        assert made.result(name) == expected_output(made.requests[name])


def test_a_preempted_sequence_gets_its_former_position() -> None:
    made = harness()
    for name in "abc":
        made.add(name, 4, **endless())
    made.step()
    made.scheduler.pause("b")
    made.add("d", 4, **endless())
    made.step()
    assert [row.request_id for row in made.step().rows] == ["a", "c", "d"]
    made.scheduler.resume("b")
    assert [row.request_id for row in made.step().rows] == ["a", "b", "c", "d"]


def test_preemption_repeats_and_loses_no_token() -> None:
    made = decoding_abc(16)
    made.run_all()
    assert made.scheduler.num_preemptions > 2
    for name in "abc":
        assert made.result(name) == expected_output(made.requests[name])
        assert made.chunks[name][-1].prompt_tokens == 8


def test_preemptions_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    made = decoding_abc(16)
    with caplog.at_level(logging.INFO, "llm.scheduler"):
        while made.scheduler.num_preemptions < 2:
            made.step()
        assert (made.now < 1.0, caplog.text.count("preempted ")) == (True, 1)
        made.now += 1.0
        while made.scheduler.num_preemptions < 3:
            made.step()
    assert caplog.text.count("preempted ") == 2
    assert "3 preemptions so far" in caplog.text


def test_a_lower_priority_gives_its_pages_first() -> None:
    made = harness(7, page_size=4, kvcache_ce_watermark=1.0)
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        made.add(name, 8, priority=priority, **endless())
    made.step()
    assert [row.request_id for row in made.step().rows] == ["a", "c"]


def test_those_after_one_that_lost_its_pages_still_run() -> None:
    made = harness(6, page_size=4, kvcache_ce_watermark=1.0)
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        made.add(name, 8, priority=priority, **endless())
        made.step()
    assert [row.request_id for row in made.step().rows] == ["a", "c"]


@pytest.mark.parametrize(
    ("allowed", "left", "steps"), [(1, 8, 1), (2, 8, 2), (8, 8, 8), (8, 3, 3), (8, 1, 1)]
)
def test_a_turn_has_the_steps_that_are_allowed_and_of_use(
    allowed: int, left: int, steps: int
) -> None:
    made = harness(max_num_steps=allowed)
    made.add("a", 4, **endless(max_tokens=1 + left))
    made.step()
    assert made.step().num_steps == steps


def test_fewer_steps_are_tried_before_a_preemption() -> None:
    made = harness(7, page_size=4, max_num_steps=8, kvcache_ce_watermark=1.0)
    for name in "ab":
        made.add(name, 9, **endless(max_tokens=15))
    made.step()
    batch = made.step()
    assert (batch.num_steps, len(batch.rows), made.scheduler.num_preemptions) == (1, 2, 0)
    made.run_all()
    for name in "ab":
        assert made.result(name) == expected_output(made.requests[name])


def test_a_page_can_be_shared_as_soon_as_it_is_full() -> None:
    made = harness(100, page_size=4)
    request = made.add("a", 7, **endless())
    made.step()
    made.step()  # feeds the first token that was sampled
    made.add("b", [*request.prompt_ids, made.tokens("a")[0], 1], **endless())
    made.step()
    assert made.kv.prefix_hit_tokens == 8


def test_one_that_outgrows_the_pool_fails_alone() -> None:
    made = harness(4, page_size=4)
    made.add("big", 4, **endless())
    made.add("small", 4, max_tokens=2, stop_token_ids=())
    made.run_all(60)
    assert made.reason("big") is FinishReason.ERROR
    assert len(made.tokens("big")) == 13  # the last of them could not be fed
    assert "17 tokens need 5 KV pages of 4 tokens; the pool has 4" in made.chunks["big"][-1].error
    assert made.reason("small") is FinishReason.LENGTH


def test_a_prompt_larger_than_the_pool_fails_at_once() -> None:
    made = harness(4, page_size=4, enable_in_flight_batching=True)
    made.add("running", 4, **endless(max_tokens=8))
    made.step()
    made.add("huge", 17)
    made.step()
    assert made.reason("huge") is FinishReason.ERROR
    assert made.reason("running") is None


@pytest.mark.parametrize(
    ("total", "message"),
    [
        (None, "17 tokens need 5 KV pages of 4 tokens; the pool has 4;"),
        (17, "17 tokens need 5 KV pages of 4 tokens; the pool has 4;"),
        (100, "17 tokens need 5 KV pages of 4 tokens; the pool has 4;"),
        (16, "17 tokens exceed max_batch_total_tokens=16;"),
    ],
)
def test_a_request_that_can_never_run_gets_the_limit_in_its_error(
    total: int | None, message: str
) -> None:
    made = harness(4, page_size=4, max_batch_total_tokens=total)
    made.add("huge", 17)
    made.step()
    assert made.chunks["huge"][-1].error == f"{message} use a shorter prompt or fewer tokens"


def test_priority_and_ageing_order_the_queue() -> None:
    made = harness(max_batch_size=1)
    made.add("old", 4, max_tokens=1)
    made.now = 4.0
    made.add("urgent", 4, max_tokens=1, priority=1)  # a level is worth five seconds
    made.now = 8.0
    made.add("late", 4, max_tokens=1, priority=1)
    made.add("next", 4, max_tokens=1)
    order = [batch.rows[0].request_id for batch in made.run_all()]
    assert order == ["urgent", "old", "late", "next"]


def test_a_batch_must_be_committed_before_the_next() -> None:
    made = harness()
    made.add("a", 4)
    batch = made.schedule()
    with pytest.raises(RuntimeError, match="neither committed nor failed"):
        made.schedule()
    with pytest.raises(RuntimeError, match="not the running one"):
        made.scheduler.commit(ScheduledBatch((), TG), StepOutput({}))
    made.run(batch)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch_size": 9, "max_batch_input_tokens": 8}, "must be at least max_batch_size=9"),
        ({"kvcache_ce_watermark": 0.0}, r"must be in \(0, 1\]"),
        ({"max_batch_size": 0}, "max_batch_size=0 must be ≥ 1"),
        ({"max_length": 1}, "leaves no room"),
    ],
)
def test_contradicting_limits_are_errors(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness(**limits)


def test_the_model_limit_and_the_constructor_win() -> None:
    kv = ShadowPipeline().kv_manager
    made = Scheduler(SchedulerLimits(max_length=100), kv, max_seq_len=50)
    assert made.max_length == 50
    assert Scheduler(SchedulerLimits(max_length=40), kv, max_seq_len=50).max_length == 40


def test_check_integrity_finds_claims_without_a_sequence_and_sequences_without_a_claim() -> None:
    made = harness(100, page_size=4)
    made.add("runs", 7, **endless())
    made.step()
    made.add("waits", 3)
    for name, message in (("waits", "does not match the KV manager"), ("unknown", "has ended")):
        made.kv.claim(name, [1, 2, 3])
        with pytest.raises(AssertionError, match=message):
            made.scheduler.check_integrity()
        made.kv.release(name)
    made.scheduler.check_integrity()
    made.kv.release("runs")
    with pytest.raises(AssertionError, match="does not match the KV manager"):
        made.scheduler.check_integrity()


def test_repr_has_the_load() -> None:
    made = harness(10, page_size=4)
    made.add("a", 4)
    batch = made.schedule()
    assert repr(made.scheduler) == (
        "Scheduler(1 rows running, SequenceTable(0 pending, 1 prefilling, 0 decoding, 0 paused), "
        "KVCacheManager(1 requests hold 1 of 10 pages, 0 cached), 0 preemptions)"
    )
    made.run(batch)
