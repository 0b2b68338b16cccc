"""Scheduler: cancel, pause, resume and failure in every state; delivered chunks and their times."""

from __future__ import annotations

import itertools
import random

import pytest

from llm.batch import ScheduledRow, StepOutput
from llm.request import FinishReason, Request, SamplingParams, TokenChunk, TokenLogprob
from llm.scheduler import SchedulerLimits
from llm.scheduler.table import PendingQueue
from llm.sequence import ReceivedPrompt, Sequence
from tests.llm.scheduler.shadow import EOS, Harness, ShadowPipeline, expected_output


def harness(num_pages: int = 100, **limits: object) -> Harness:
    pipeline = ShadowPipeline(num_pages + 1, 4)
    defaults: dict[str, object] = {"max_batch_size": 4, "max_batch_input_tokens": 8}
    return Harness(SchedulerLimits(**(defaults | limits)), pipeline)  # type: ignore[arg-type]


def endless(**more: object) -> dict[str, object]:
    return {"stop_token_ids": (), "max_tokens": 9} | more


STATES = [
    "pending",
    "half prefilled",
    "decoding",
    "paused",
    "preempted",
    "prefilling now",
    "in a step",
]


def in_state(state: str) -> Harness:
    """Return a harness whose request "x" is in that state."""
    made = harness(num_pages=6, kvcache_ce_watermark=1.0)
    if state == "pending":
        made.add("x", 4, **endless())
    elif state == "half prefilled":
        made.add("x", 12, **endless())
        made.step()
    elif state == "prefilling now":
        made.add("x", 12, **endless())
    elif state == "preempted":
        made.add("other", 8, **endless(max_tokens=9))
        made.step()
        made.add("x", 8, **endless(max_tokens=9))
        while not made.scheduler.num_preemptions:
            made.step()
    else:
        made.add("x", 4, **endless())
        made.step()
    if state == "paused":
        made.scheduler.pause("x")
    return made


@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state(state: str) -> None:
    made = in_state(state)
    before = made.tokens("x")
    batch = made.schedule() if state in ("prefilling now", "in a step") else None
    made.take(made.scheduler.cancel("x"))
    if batch is not None:
        assert made.reason("x") is None, "its pages are in use until the step has run"
        made.run(batch)
    assert made.reason("x") is FinishReason.CANCELLED
    assert made.tokens("x") == before
    made.scheduler.check_integrity()
    made.run_all()
    assert made.kv.used_pages == 0


@pytest.mark.parametrize("state", STATES)
def test_pause_and_resume_in_every_state(state: str) -> None:
    made = in_state(state)
    batch = made.schedule() if state in ("prefilling now", "in a step") else None
    made.scheduler.pause("x")
    if batch is not None:
        made.run(batch)
    known = made.tokens("x")
    while batch := made.schedule():  # the other requests end without it
        assert "x" not in {row.request_id for row in batch.rows}
        made.run(batch)
    assert (made.scheduler.num_live, made.scheduler.num_paused) == (1, 1)
    assert made.tokens("x") == known
    made.scheduler.resume("x")
    made.run_all()
    assert made.result("x") == expected_output(made.requests["x"])


def test_a_paused_sequence_keeps_its_pages() -> None:
    made = in_state("paused")
    pages = list(made.kv.pages("x"))
    made.add("y", 4, **endless(max_tokens=4))
    while made.reason("y") is None:
        made.step()
    assert list(made.kv.pages("x")) == pages
    made.scheduler.resume("x")
    assert not made.step().rows[0].is_extend


def test_a_paused_sequence_gives_its_pages_when_they_are_needed() -> None:
    made = in_state("paused")
    made.add("y", 21, **endless(max_tokens=4))
    made.step()
    assert made.reason("y") is None
    assert made.scheduler.num_preemptions == 1
    assert not made.kv.has_claim("x")
    made.scheduler.resume("x")
    made.run_all()
    for name in "xy":
        assert made.result(name) == expected_output(made.requests[name])


def test_a_paused_sequence_with_pages_that_never_ran_stays_in_front() -> None:
    """Behind an older prompt that needs those pages none of the two could ever run."""
    made = harness(num_pages=10, kvcache_ce_watermark=1.0)
    made.add("older", 36, **endless(max_tokens=2))
    request = Request("x", tuple(range(1, 13)), SamplingParams(max_tokens=2))
    assert made.kv.claim("claim", range(13), is_transfer=True) == 0
    made.scheduler.check_integrity()
    sequence = Sequence(request, made.now)
    sequence.received = ReceivedPrompt("claim", 0, 0)
    made.requests["x"], made.chunks["x"] = request, []
    made.scheduler.add(sequence)
    made.scheduler.pause("x")
    made.scheduler.resume("x")
    made.scheduler.check_integrity()
    made.run_all()
    for name in ("older", "x"):
        assert made.result(name) == expected_output(made.requests[name])


def test_a_paused_sequence_is_not_preempted_without_effect() -> None:
    made = harness(num_pages=10)
    made.add("running", 20, **endless(max_tokens=20))
    made.add("paused", 4, **endless())
    for _ in range(4):
        made.step()
    made.scheduler.pause("paused")
    made.add("big", 20, **endless())
    made.step()
    assert made.scheduler.num_waiting == 1, "even the paused one's pages would not be enough"
    assert made.kv.has_claim("paused")


def test_pause_and_resume_within_one_step_change_nothing() -> None:
    made = in_state("decoding")
    batch = made.schedule()
    made.scheduler.pause("x")
    made.scheduler.resume("x")
    made.run(batch)
    assert made.step().rows[0].request_id == "x"


def test_unknown_ids_are_ignored() -> None:
    made = harness()
    made.scheduler.pause("missing")
    made.scheduler.resume("missing")
    assert made.scheduler.cancel("missing") == []


def test_cancel_all() -> None:
    made = in_state("preempted")
    made.take(made.scheduler.cancel_all())
    assert {made.reason("x"), made.reason("other")} == {FinishReason.CANCELLED}
    assert made.scheduler.num_live == made.kv.used_pages == 0


def test_a_failed_step_ends_its_requests_only() -> None:
    made = harness(max_batch_size=2)
    for name in "abc":
        made.add(name, 4, **endless(max_tokens=3))
    batch = made.schedule()
    made.scheduler.cancel("b")
    made.pipeline.fail_next = True
    made.run(batch)
    assert (made.reason("a"), made.reason("b")) == (FinishReason.ERROR, FinishReason.CANCELLED)
    assert made.chunks["a"][-1].error == "the device is out of memory"
    made.scheduler.check_integrity()
    made.run_all()
    assert made.result("c") == expected_output(made.requests["c"])


def test_a_row_without_a_result_fails_alone() -> None:
    made = harness()
    made.add("a", 4, **endless())
    made.add("b", 4, **endless())
    made.take(made.scheduler.commit(made.schedule(), StepOutput({"b": (7,)}), 1.0))
    assert made.reason("a") is FinishReason.ERROR
    assert "no token" in made.chunks["a"][-1].error
    assert made.tokens("b") == [7]
    assert made.scheduler.num_live == 1


def commit_one(made: Harness, tokens: tuple[int, ...]) -> TokenChunk | None:
    batch = made.schedule()
    chunks = made.scheduler.commit(batch, StepOutput({"a": tokens}), made.now)
    made.scheduler.check_integrity()
    return chunks[0] if chunks else None


def test_the_stop_id_ends_and_is_not_delivered() -> None:
    made = harness(max_num_steps=5)
    made.add("a", 4, stop_token_ids=(EOS,), max_tokens=20)
    commit_one(made, (5,))
    chunk = commit_one(made, (6, 7, EOS, 8, 9))
    assert chunk is not None
    assert (chunk.token_ids, chunk.finish_reason) == ((6, 7), FinishReason.STOP)
    assert (chunk.output_tokens, made.scheduler.num_live) == (3, 0)


def test_surplus_tokens_of_a_turn_are_dropped() -> None:
    made = harness(max_num_steps=4)
    made.add("a", 4, **endless(max_tokens=3))
    made.add("b", 4, **endless(max_tokens=9))
    made.step()
    batch = made.schedule()
    assert batch.num_steps == 4
    made.run(batch)
    assert made.result("a") == expected_output(made.requests["a"])
    assert len(made.tokens("b")) == 5
    made.run_all()


def test_stop_ids_under_ignore_eos_count_but_are_not_delivered() -> None:
    made = harness()
    made.add("a", 4, stop_token_ids=(EOS,), ignore_eos=True, max_tokens=3)
    assert commit_one(made, (EOS,)) is None
    chunk = commit_one(made, (5,))
    assert chunk is not None
    assert (chunk.token_ids, chunk.output_tokens) == ((5,), 2)
    chunk = commit_one(made, (EOS,))
    assert chunk is not None
    assert (chunk.token_ids, chunk.output_tokens) == ((), 3)
    assert chunk.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_log_probabilities_stay_with_their_tokens(ignore_eos: bool) -> None:
    made = harness(max_num_steps=4)
    made.add("a", 4, stop_token_ids=(EOS,), ignore_eos=ignore_eos, max_tokens=6, top_logprobs=0)
    made.step()
    sampled = (5, 6, EOS, 7)
    logprobs = tuple(TokenLogprob(token, -1.0) for token in sampled)
    output = StepOutput({"a": sampled}, {"a": logprobs})
    (chunk,) = made.scheduler.commit(made.schedule(), output, 1.0)
    assert chunk.token_ids == ((5, 6, 7) if ignore_eos else (5, 6))
    assert tuple(entry.token_id for entry in chunk.logprobs) == chunk.token_ids


def test_counts_and_timings_of_a_request() -> None:
    made = harness()
    made.add("a", 12, **endless(max_tokens=2))
    made.now = 2.0
    made.step()  # first chunk of the prompt at 2.0
    made.now = 5.0
    made.step()  # first token
    made.now = 9.0
    made.step()
    first, last = made.chunks["a"]
    assert first.queue_s == 2.0
    assert first.prefill_s == pytest.approx(3.001)
    assert last.total_s == pytest.approx(9.001)
    assert [chunk.output_tokens for chunk in (first, last)] == [1, 2]
    assert (last.prompt_tokens, last.cached_prompt_tokens) == (12, 0)
    made.add("b", [*made.requests["a"].prompt_ids, 3], **endless(max_tokens=1))
    made.run_all()
    assert made.chunks["b"][-1].cached_prompt_tokens == 12


def test_rows_are_views_so_that_long_sequences_cost_no_more() -> None:
    made = harness()
    made.add("a", 4, **endless())
    made.step()
    rows = [made.step().rows[0] for _ in range(3)]
    assert len({id(row.pages) for row in rows}) == len({id(row.output_ids) for row in rows}) == 1
    assert [len(row.token_ids) for row in rows] == [1, 1, 1]
    assert rows == [ScheduledRow(**row._asdict()) for row in rows], "every field is there"


def test_a_starved_priority_runs_in_the_end() -> None:
    """A stream of urgent requests, one at a time: the patient one gets its turn by ageing."""
    made = harness(max_batch_size=1)
    made.add("patient", 4, **endless(max_tokens=1))
    for index in itertools.count():
        made.add(f"urgent{index}", 4, priority=2, **endless(max_tokens=1))
        made.now += 1.0
        made.step()
        if made.reason("patient"):
            break
        assert index < 12
    assert index == 10  # two levels of five seconds


def test_the_queue_survives_churn() -> None:
    queue, rng = PendingQueue(), random.Random(5)
    waiting: list[Sequence] = []
    for index in range(600):
        if rng.random() < 0.6 or not waiting:
            request = Request(f"r{index}", (1,), SamplingParams(), priority=rng.randint(-2, 2))
            sequence = Sequence(request, arrival_s=index * 0.7)
            waiting.append(sequence)
            queue.push(sequence)
        else:
            sequence = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(sequence)
            if rng.random() < 0.3:
                queue.push(sequence)
                waiting.append(sequence)
        queue.check_integrity()
        assert set(queue) == set(waiting)
    expected = sorted(waiting, key=lambda s: s.arrival_s - 5.0 * s.request.priority)
    assert list(queue) == expected
    assert [queue.pop() for _ in expected] == expected
    assert repr(queue) == "PendingQueue(0 in front, 0 behind)"
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove(expected[0])


def test_those_that_ran_before_queue_in_front_oldest_first() -> None:
    queue = PendingQueue()
    names = ["new", "preempted late", "preempted early", "half prefilled"]
    waiting = [
        Sequence(Request(name, (1,), SamplingParams()), arrival_s=4.0 - index)
        for index, name in enumerate(names)
    ]
    waiting[3].arrival_s = 9.0
    waiting[3].bind([1], 0)
    queue.push(waiting[0])
    for sequence in waiting[1:]:
        queue.push_front(sequence)
    assert [sequence.request_id for sequence in queue] == names[::-1]
    assert list(queue.holders()) == [waiting[3]]
