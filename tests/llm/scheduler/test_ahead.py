"""Planning ahead: the next batch is scheduled while one runs, with placeholders for its tokens."""

from __future__ import annotations

import threading

import pytest

from llm.batch import ForwardMode, ScheduledBatch, StepOutput
from llm.engine.engine import Engine
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from llm.scheduler import Scheduler, SchedulerLimits
from llm.sequence import FUTURE_TOKEN, Sequence
from tests.llm.scheduler.shadow import EOS, Harness, LateShadowPipeline, expected_output

EMPTY = ScheduledBatch((), ForwardMode.IDLE)


def harness(num_pages: int = 100, **limits: object) -> Harness:
    return Harness(SchedulerLimits(**limits), LateShadowPipeline(num_pages + 1, 4))  # type: ignore[arg-type]


def ending_with_stop(made: Harness, num_tokens: int) -> Request:
    """Return a request that samples a stop id after so many tokens."""
    for seed in range(1000):
        params = SamplingParams(seed=seed, stop_token_ids=(EOS,), max_tokens=30)
        request = Request("stops", (3, 4, 5), params)
        tokens, reason, _ = expected_output(request)
        if reason is FinishReason.STOP and len(tokens) == num_tokens:
            return made.add("stops", request.prompt_ids, seed=seed, max_tokens=30)
    raise AssertionError("no such seed")


def fed(batch: ScheduledBatch) -> list[tuple[int, ...]]:
    return [row.token_ids for row in batch.rows]


def test_results_come_one_step_later() -> None:
    made = harness()
    made.add("a", (7, 8), max_tokens=3, stop_token_ids=())
    counts, batches = [], []
    for _ in range(5):
        batches.append(made.step())
        counts.append(len(made.tokens("a")))
    assert [fed(batch) for batch in batches] == [
        [(7, 8)],
        [(FUTURE_TOKEN,)],
        [(FUTURE_TOKEN,)],
        [],  # all three tokens are being sampled: no step is wasted on a known length
        [],
    ]
    assert counts == [0, 1, 2, 3, 3]
    assert made.result("a") == expected_output(made.requests["a"])


def test_a_stop_id_costs_one_step_and_the_late_token_is_dropped() -> None:
    made = harness()
    request = ending_with_stop(made, num_tokens=4)
    held = []
    while not made.chunks["stops"] or made.has_in_flight:
        made.step()
        ended = made.reason("stops") is not None
        held.append((ended, made.has_in_flight, made.kv.used_pages > 0))
    # It has ended while a step with it still runs: its pages are kept until that step has ended.
    assert (True, True, True) in held
    assert held[-1] == (True, False, False)
    with_request = [batch for batch in made.pipeline.batches if batch.rows]
    assert len(with_request) == 1 + 4 + 1  # prompt, four tokens, one too many
    assert made.result("stops") == expected_output(request)


def test_an_id_can_be_used_again_before_the_late_step_has_ended() -> None:
    made = harness()
    ending_with_stop(made, num_tokens=2)
    while made.reason("stops") is None:
        made.step()
    assert made.has_in_flight
    again = made.add("stops", (9, 9, 9, 9, 9), stop_token_ids=(), max_tokens=5)
    made.run_all()
    assert made.result("stops") == expected_output(again)
    assert made.kv.num_claims == 0


def test_a_prompt_chunk_awaits_no_token() -> None:
    made = harness(max_batch_input_tokens=4, max_batch_size=1)
    made.add("a", 10, max_tokens=2, stop_token_ids=())
    batches = [made.step() for _ in range(4)]
    assert [len(row.token_ids) for batch in batches for row in batch.rows] == [4, 4, 2, 1]
    assert [row.samples for batch in batches for row in batch.rows] == [False, False, True, True]
    made.run_all()
    assert made.result("a") == expected_output(made.requests["a"])


def test_sequences_of_a_running_step_are_not_preempted() -> None:
    """Three rows grow in a pool for two: the running step ends before a preemption."""
    made = harness(num_pages=6, max_batch_size=3, kvcache_ce_watermark=1.0)
    for name in "abc":
        made.add(name, 4, max_tokens=8, stop_token_ids=())
    flushed = 0
    while made.scheduler.num_live or made.has_in_flight:
        flushed += not made.step().rows
    assert made.scheduler.num_preemptions > 0
    assert flushed > 1
    for name in "abc":
        assert made.result(name) == expected_output(made.requests[name])


def test_two_placeholders_are_refused() -> None:
    sequence = Sequence(Request("a", (1, 2)))
    sequence.limit_length(100)
    sequence.bind([1, 2, 3], 0)
    sequence.activate(2)
    sequence.launch(samples=True)
    assert sequence.tokens == [1, 2, FUTURE_TOKEN]
    sequence.activate(1)
    with pytest.raises(ValueError, match="already awaits a token"):
        sequence.launch(samples=True)
    sequence.complete_launch()
    assert (sequence.tokens, sequence.accept(9), sequence.tokens) == ([1, 2, 9], None, [1, 2, 9])


def test_batches_are_launched_and_committed_in_order() -> None:
    pipeline = LateShadowPipeline()
    scheduler = Scheduler(SchedulerLimits(), pipeline.kv_manager, plan_ahead=True)
    scheduler.add(Sequence(Request("a", (1, 2), SamplingParams(max_tokens=9))))
    first = scheduler.schedule()
    with pytest.raises(RuntimeError, match="not launched"):
        scheduler.schedule()
    scheduler.launched(first)
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="neither committed nor failed"):
        scheduler.schedule()
    with pytest.raises(RuntimeError, match="not the running one"):
        scheduler.commit(second, StepOutput({"a": (5,)}))
    with pytest.raises(RuntimeError, match="not the last one"):
        scheduler.launched(first)
    scheduler.commit(first, StepOutput({"a": (5,)}))
    with pytest.raises(RuntimeError, match="not a running one"):
        scheduler.fail(first, "again")
    assert scheduler.commit(second, StepOutput({"a": (6,)}))[0].token_ids == (6,)


@pytest.mark.parametrize("ahead", [False, True])
def test_cancelled_or_failed_in_the_middle(ahead: bool) -> None:
    made = harness()
    for name in "abc":
        made.add(name, 6, stop_token_ids=(), max_tokens=40)
    for _ in range(3):
        made.step()
    if ahead:
        batch = made.schedule()
    made.take(made.scheduler.cancel("b"))
    if ahead:
        made.run(batch)
    made.pipeline.fail_next = True
    made.step()
    made.run_all()
    assert made.reason("b") is FinishReason.CANCELLED
    assert [made.reason(name) for name in "ac"] == [FinishReason.ERROR] * 2
    for name in "abc":
        expected = expected_output(made.requests[name])[0]
        assert made.tokens(name) == expected[: len(made.tokens(name))]
        assert made.chunks[name][-1].output_tokens == len(made.tokens(name))
    assert made.kv.num_claims == 0


class Rig:
    """An engine on a late pipeline."""

    def __init__(self) -> None:
        self.pipeline = LateShadowPipeline(200)
        limits = SchedulerLimits(max_batch_size=8, max_batch_input_tokens=32)
        scheduler = Scheduler(limits, self.pipeline.kv_manager, plan_ahead=True)
        self.engine = Engine(self.pipeline, scheduler)
        self.scheduler = scheduler


def test_the_engine_drives_a_late_pipeline() -> None:
    rig = Rig()
    requests = [
        Request(
            f"r{n}", (1 + n, 5, 6), SamplingParams(seed=n, max_tokens=20, stop_token_ids=(EOS,))
        )
        for n in range(20)
    ]
    streams = [rig.engine.submit(request) for request in requests]
    rig.engine.start()
    for request, stream in zip(requests, streams, strict=True):
        tokens = [token for chunk in stream for token in chunk.token_ids]
        assert tokens == expected_output(request)[0]
    assert rig.engine.drain(60)
    assert rig.engine.stats().used_pages == 0  # late results have been waited for
    rig.scheduler.check_integrity()
    rig.engine.shutdown()


def test_the_engine_outlives_a_failed_step_of_a_late_pipeline() -> None:
    rig = Rig()
    rig.engine.start()
    endless = SamplingParams(max_tokens=100, ignore_eos=True)
    chunks: dict[str, list[TokenChunk]] = {"a": [], "c": []}
    ended = threading.Semaphore(0)

    def failing(chunk: TokenChunk) -> None:
        chunks["a"].append(chunk)
        rig.pipeline.fail_next = len(chunks["a"]) == 3
        if chunk.finish_reason is not None:
            ended.release()

    def stopping(chunk: TokenChunk) -> None:
        chunks["c"].append(chunk)
        rig.engine.shutdown()

    rig.engine.submit(Request("a", (1, 2), endless), failing)
    assert ended.acquire(timeout=60)
    assert (len(chunks["a"]), chunks["a"][-1].finish_reason) == (4, FinishReason.ERROR)
    after = Request("b", (1, 2), SamplingParams(max_tokens=5, stop_token_ids=(EOS,)))
    tokens = [token for chunk in rig.engine.submit(after) for token in chunk.token_ids]
    assert tokens == expected_output(after)[0]
    rig.engine.submit(Request("c", (1, 2), endless), stopping)
    rig.engine.shutdown()
    assert chunks["c"][-1].finish_reason is FinishReason.CANCELLED
    assert not rig.pipeline.has_pending_outputs()
    assert rig.engine.stats().used_pages == 0


@pytest.mark.parametrize(
    ("lengths", "num_rows"), [((8, 8, 8), 0), ((8, 8, 7), 0), ((8, 7, 7), 3), ((7, 7, 7), 3)]
)
def test_a_batch_is_planned_ahead_only_when_every_row_can_have_its_page(
    lengths: tuple[int, ...], num_rows: int
) -> None:
    """Six of seven pages are held, and a context of eight tokens needs another one."""
    made = harness(7, kvcache_ce_watermark=1.0)
    for name, length in zip("abc", lengths, strict=True):
        made.add(name, length, max_tokens=5, stop_token_ids=())
    assert len(made.step().rows) == 3
    assert (made.kv.used_pages, made.has_in_flight) == (6, True)
    assert len(made.step().rows) == num_rows
    made.run_all()
    for name in "abc":
        assert made.result(name) == expected_output(made.requests[name])


def counts(scheduler: Scheduler) -> tuple[int, int, int]:
    return scheduler.num_waiting, scheduler.num_running, scheduler.num_decoding


def test_prefilling_decoding_and_ending_sequences_count_as_running() -> None:
    made = harness()
    for name, max_tokens in (("ends", 2), ("continues", 9)):
        made.add(name, 4, max_tokens=max_tokens, stop_token_ids=())
    assert counts(made.scheduler) == (2, 0, 0)
    made.step()
    assert counts(made.scheduler) == (0, 2, 2)
    made.step()  # the last token of one is being sampled
    assert counts(made.scheduler) == (0, 2, 2)
    made.add("new", 4, max_tokens=1, stop_token_ids=())
    batch = made.schedule()
    assert counts(made.scheduler) == (0, 3, 2)
    made.run(batch)
    made.run_all()
    assert counts(made.scheduler) == (0, 0, 0)


def test_check_integrity_finds_that_pages_of_a_running_batch_were_given_away() -> None:
    made = harness()
    made.add("a", 4, max_tokens=9, stop_token_ids=())
    made.step()
    made.take(made.scheduler.cancel("a"))
    made.scheduler.check_integrity()
    assert made.kv.used_pages > 0
    made.kv.release("a/departed-0")
    with pytest.raises(AssertionError, match="pages of a request that has ended"):
        made.scheduler.check_integrity()
