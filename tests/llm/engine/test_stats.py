"""Statistics: batches by kind, ends by reason, first tokens, gaps between tokens."""

from __future__ import annotations

import pickle
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.engine.engine import Engine
from llm.request import FinishReason, Request, SamplingParams
from llm.scheduler import Scheduler, SchedulerLimits
from llm.stats import (
    CANCEL_BOUNDS_S,
    ROW_BOUNDS,
    STEP_BOUNDS_S,
    TOKEN_BOUNDS,
    WAIT_BOUNDS_S,
    Histogram,
    HistogramCounter,
    StepCounters,
)
from tests.llm.scheduler.shadow import Harness, LateShadowPipeline, ShadowPipeline


def test_an_observation_is_counted_at_the_first_bound_that_holds_it() -> None:
    counter = HistogramCounter((1, 2, 4))
    for value in (0.5, 1, 2, 3, 4):
        counter.observe(value)
    counter.observe(9, times=3)
    assert counter.snapshot() == Histogram((1, 2, 4), (2, 1, 2, 3), 10.5 + 27)
    assert counter.snapshot().count == 8


def test_the_bounds_are_those_that_recorded_metrics_have() -> None:
    """They are labels of the exported histograms: changing them breaks sums over time."""
    ms = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 5000]
    assert pytest.approx([bound / 1000 for bound in ms]) == STEP_BOUNDS_S
    ms = [0.5, 1, 2, 3, 4, 5, 6, 8, 10, 15, 25, 100, 1000]
    assert pytest.approx([bound / 1000 for bound in ms]) == CANCEL_BOUNDS_S
    ms = [5, 10, 25, 50, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000, 10_000, 30_000]
    assert pytest.approx([bound / 1000 for bound in ms]) == WAIT_BOUNDS_S
    assert tuple(2**power for power in range(10)) == ROW_BOUNDS
    assert tuple(4**power for power in range(9)) == TOKEN_BOUNDS


@given(st.lists(st.floats(0, 10, width=16)))
def test_a_histogram_loses_nothing(values: list[float]) -> None:
    counter = HistogramCounter(STEP_BOUNDS_S)
    for value in values:
        counter.observe(value)
    made = counter.snapshot()
    assert (made.count, len(made.counts)) == (len(values), len(made.bounds) + 1)
    assert made.total == pytest.approx(sum(values))
    for index, bound in enumerate(made.bounds):
        assert sum(made.counts[: index + 1]) == sum(value <= bound for value in values)


def test_batches_are_counted_by_kind() -> None:
    pipeline, counters = ShadowPipeline(100, 4), StepCounters()
    limits = SchedulerLimits(max_batch_size=8, max_batch_input_tokens=8)
    made = Harness(limits, pipeline)
    made.add("a", 4, stop_token_ids=(), max_tokens=5)
    made.add("b", 12, stop_token_ids=(), max_tokens=3)
    for number, batch in enumerate(made.run_all()):
        counters.scheduled(batch, 0.001)
        if number:
            counters.executed(batch, 0.01)
    by_mode = {counts.mode: counts for counts in counters.snapshot()}
    extend, mixed, decode = (
        by_mode[mode] for mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE)
    )
    assert [made.rows.count for made in (extend, mixed, decode)] == [1, 2, 2]
    assert [made.rows.total for made in (extend, mixed, decode)] == [2, 4, 4]
    assert [made.input_tokens.total for made in (extend, mixed, decode)] == [8, 10, 4]
    # a has 4, b 4 · a 5, b 11 · a 6, b 12 · a 7, b 13 · a 8, b 14
    assert [made.context_tokens.total for made in (extend, mixed, decode)] == [8, 34, 42]
    assert (extend.execute_s.count, decode.execute_s.total) == (0, pytest.approx(0.02))
    assert (counters.steps, counters.input_tokens) == (5, 22)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_is_attributed_to_the_batch_whose_results_it_brought(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the call that ends a prefill takes time: the next one, if results arrive late."""
    clock = SimpleNamespace(now_s=0.0)
    clock.perf_counter, clock.monotonic = lambda: clock.now_s, time.monotonic
    monkeypatch.setattr("llm.engine.engine.time", clock)

    class Slow(LateShadowPipeline if is_late else ShadowPipeline):  # type: ignore[misc]
        waits_for_prefill = False

        def execute(self, batch: ScheduledBatch, /) -> StepOutput:
            is_prefill = batch.mode is ForwardMode.EXTEND
            is_slow = self.waits_for_prefill if is_late else is_prefill
            self.waits_for_prefill = is_prefill
            if is_slow:
                clock.now_s += 1.0
            return super().execute(batch)

    pipeline = Slow(100, 4)
    scheduler = Scheduler(SchedulerLimits(), pipeline.kv_manager, plan_ahead=is_late)
    engine = Engine(pipeline, scheduler)
    engine.start()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    list(engine.submit(Request("a", (1, 2, 3), params)))
    engine.shutdown()
    extend, decode, _ = engine.stats().batches
    assert (extend.execute_s.count, decode.execute_s.count) == (1, decode.rows.count)
    assert (extend.execute_s.total, decode.execute_s.total) == (1.0, 0.0)


def test_first_tokens_and_gaps_are_timed_by_the_schedulers_clock() -> None:
    made = Harness(SchedulerLimits(), ShadowPipeline(100, 4), clock_step=0.0)
    for name in "abc":
        made.add(name, 4, stop_token_ids=(), max_tokens=4)
    for now in (0.25, 0.27, 0.35, 0.36):
        made.now = now
        made.step()
    counts = made.scheduler.stats()
    assert (counts.first_token_s.count, counts.first_token_s.total) == (3, 0.75)
    assert counts.token_gap_s.count == 9
    assert counts.token_gap_s.total == pytest.approx(3 * 0.11)
    gaps = dict(zip(counts.token_gap_s.bounds, counts.token_gap_s.counts, strict=False))
    assert (gaps[0.01] + gaps[0.025], gaps[0.1]) == (6, 3)


def test_a_gap_spans_a_preemption() -> None:
    made = Harness(SchedulerLimits(kvcache_ce_watermark=1.0), ShadowPipeline(8, 4), clock_step=0.0)
    for name in "abc":
        made.add(name, 8, stop_token_ids=(), max_tokens=5)
    while made.scheduler.num_live:
        made.now += 1.0
        made.step()
    assert made.scheduler.num_preemptions
    counts = made.scheduler.stats()
    assert (counts.first_token_s.count, counts.token_gap_s.count) == (3, 12)
    assert counts.token_gap_s.total > 12


def test_ends_are_counted_by_reason() -> None:
    made = Harness(SchedulerLimits(max_batch_size=4), ShadowPipeline(12, 4))
    made.add("a", 4, stop_token_ids=(), max_tokens=1)
    made.add("b", 4, stop_token_ids=(5,), max_tokens=9)
    made.add("c", 4, stop_token_ids=(), max_tokens=9)
    batch = made.schedule()
    made.take(made.scheduler.commit(batch, StepOutput({"a": (1,), "b": (5,), "c": (2,)}), 1.0))
    made.take(made.scheduler.cancel("c"))
    made.add("huge", 400)
    made.step()
    assert made.scheduler.stats().finished == dict.fromkeys(FinishReason, 1)


def test_engine_statistics_can_be_pickled() -> None:
    pipeline = ShadowPipeline(100, 4)
    engine = Engine(pipeline, Scheduler(SchedulerLimits(), pipeline.kv_manager))
    engine.start()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    list(engine.submit(Request("a", (1, 2, 3), params)))
    engine.shutdown()
    stats = engine.stats()
    assert {counts.mode.value: counts.execute_s.count for counts in stats.batches} == {
        "extend": 1,
        "decode": 2,
        "mixed": 0,
    }
    assert all(counts.schedule_s.total > 0 for counts in stats.batches[:2])
    assert stats.sequences.finished[FinishReason.LENGTH] == 1
    assert (stats.decoding, stats.sequences.token_gap_s.count) == (0, 2)
    assert pickle.loads(pickle.dumps(stats)) == stats


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancellation_takes_until_the_pages_are_free(is_late: bool) -> None:
    """Pages of a running step are in use until its end; a waiting request has none."""
    pipeline = (LateShadowPipeline if is_late else ShadowPipeline)(100, 4)
    made = Harness(SchedulerLimits(max_batch_size=1), pipeline, clock_step=1.0)
    made.add("runs", 4, stop_token_ids=(), max_tokens=50)
    made.step()
    made.add("waits", 4)
    batch = made.schedule()
    for request_id in ("runs", "waits"):
        made.take(made.scheduler.cancel(request_id, asked_s=made.now - 0.25))
    held = made.kv.used_pages
    made.run(batch)
    assert held > 0
    made.run_all()
    assert made.kv.used_pages == 0
    took = made.scheduler.stats().cancel_s
    assert took.count == 1
    assert took.total == pytest.approx(0.25 + (2 if is_late else 1))
