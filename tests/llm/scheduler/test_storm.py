"""Scheduler under random events: no leak, starvation, endless loop or wrong token.

Requests share prefixes and a pool that is too small for them; they are paused, resumed, cancelled
and failed at any time, also while a batch runs. The shadow pipeline hashes what it reads back
through the page tables, so that every delivered token is compared with the request generated alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.batch import ForwardMode, ScheduledBatch
from llm.request import FinishReason, TokenBuffer
from llm.scheduler import SchedulerLimits
from llm.sequence import FUTURE_TOKEN
from tests.llm.scheduler.shadow import (
    EOS,
    Harness,
    LateShadowPipeline,
    ShadowPipeline,
    expected_output,
)

MAX_LENGTH = 40


@dataclass(frozen=True)
class Event:
    """An event before, or in the middle of, a step."""

    verb: str
    request: int
    during_step: bool


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    max_batch_size = draw(st.integers(1, 6))
    return SchedulerLimits(
        max_length=MAX_LENGTH,
        max_batch_size=max_batch_size,
        max_queue_size_tg=draw(st.one_of(st.none(), st.integers(1, 10))),
        min_batch_size_tg=draw(st.one_of(st.none(), st.integers(0, 12))),
        ce_delay_ms=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
        enable_prioritize_first_decode=draw(st.booleans()),
        max_batch_input_tokens=draw(st.integers(max_batch_size, 40)),
        max_batch_total_tokens=draw(st.one_of(st.none(), st.integers(MAX_LENGTH, 80))),
        enable_chunked_prefill=draw(st.booleans()),
        enable_in_flight_batching=draw(st.booleans()),
        kvcache_ce_watermark=draw(st.sampled_from([0.3, 0.95, 1.0])),
        max_num_steps=draw(st.integers(1, 4)),
        max_active_adapters=draw(st.sampled_from([None, None, 1, 2])),
    )


EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["add"] * 5 + ["pause", "resume", "cancel", "fail"] + ["step"] * 3),
        st.integers(0, 30),
        st.booleans(),
    ),
    max_size=60,
)


class Storm:
    """Applies events to a harness and records them."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.cancelled: set[str] = set()
        self.failed: set[str] = set()
        self.paused: set[str] = set()
        self.batches: list[ScheduledBatch] = []

    def apply(self, event: Event) -> None:
        if event.verb == "step":
            self.step()
        elif event.verb == "add":
            self.add(event.request)
        elif event.during_step:
            self.step(event)
        else:
            self._disturb(event)

    def add(self, kind: int) -> None:
        count = len(self.harness.requests)
        prompt = [1 + kind % 2] * (4 * (kind % 5)) + [3 + kind % 7] * (1 + kind % 4)
        options: dict[str, object] = {"seed": kind % 3, "max_tokens": 1 + 5 * (kind % 5)}
        if kind % 3 == 0:
            options |= {"min_tokens": options["max_tokens"]}
        if kind % 7 == 0:
            options |= {"ignore_eos": True}
        if kind % 5 == 4:  # it reads nothing from the prefix cache, but fills it
            options |= {"echo": True, "top_logprobs": 0}
        if kind % 3 < 2:
            self.harness.buffer = TokenBuffer((3, math.inf)[kind % 3])
        self.harness.add(
            f"r{count}",
            prompt,
            priority=kind % 3 - 1,
            cache_salt="s" * (kind % 2),
            lora=("", "red", "green", "blue")[count % 4],
            embeds=kind % 8 == 7,
            **options,
        )

    def _disturb(self, event: Event) -> None:
        scheduler, harness = self.harness.scheduler, self.harness
        if event.verb == "fail":
            harness.pipeline.fail_next = True
        if event.verb == "fail" or not harness.requests:
            return
        request_id = f"r{event.request % len(harness.requests)}"
        if event.verb == "cancel":
            if harness.reason(request_id) is None:
                self.cancelled.add(request_id)
            harness.take(scheduler.cancel(request_id))
            self.paused.discard(request_id)
        elif event.verb == "pause":
            scheduler.pause(request_id)
            self.paused.add(request_id)
        else:
            scheduler.resume(request_id)
            self.paused.discard(request_id)

    def step(self, event: Event | None = None) -> None:
        harness = self.harness
        batch = harness.schedule()
        harness.scheduler.check_integrity()
        if event is not None:
            self._disturb(event)
        just_now = f"r{event.request % len(harness.requests)}" if event and harness.requests else ""
        assert not {row.request_id for row in batch.rows} & (self.paused - {just_now})
        if batch:
            self.batches.append(batch)
        if batch or harness.has_in_flight:
            if harness.pipeline.fail_next:
                self.failed |= {row.request_id for row in batch.rows}
            harness.run(batch)
        harness.scheduler.check_integrity()

    def finish(self) -> None:
        """Resume all; all must end within as many steps as there are tokens to feed."""
        for request_id in sorted(self.paused):
            self.harness.scheduler.resume(request_id)
        self.paused.clear()
        self.harness.pipeline.fail_next = False
        bound = 20 + 4 * MAX_LENGTH * len(self.harness.requests)
        for _ in range(bound):
            if not self.harness.scheduler.num_live and not self.harness.has_in_flight:
                return
            before = len(self.batches) + self._num_ended()
            flushes = self.harness.has_in_flight
            self.step()
            delay_s = self.harness.scheduler.delay_s
            self.harness.now += delay_s  # a delayed prefill is delayed only once
            did = len(self.batches) + self._num_ended() > before
            assert did or flushes or delay_s, "a turn that did nothing"
        raise AssertionError(f"no end after {bound} steps: {self.harness.scheduler!r}")

    def _num_ended(self) -> int:
        return sum(
            self.harness.reason(request_id) is not None for request_id in self.harness.chunks
        )

    def check_results(self) -> None:
        harness = self.harness
        for request_id, request in harness.requests.items():
            tokens, reason, count = harness.result(request_id)
            expected = expected_output(request, MAX_LENGTH)
            assert EOS not in tokens
            assert tokens == expected[0][: len(tokens)]
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (tokens, reason, count) == expected
                echoed = [e for chunk in harness.chunks[request_id] for e in chunk.prompt_logprobs]
                wanted = request.prompt_ids if request.sampling.echo else ()
                assert tuple(entry.token_id for entry in echoed) == wanted
                vectors = harness.chunks[request_id][-1].embeddings
                assert vectors == (bytes(len(request.prompt_ids)),) * request.embeds
            elif reason is FinishReason.CANCELLED:
                assert request_id in self.cancelled
            else:
                num_pages = harness.kv.pages_for(len(request.prompt_ids) + count)
                assert request_id in self.failed or num_pages > harness.kv.total_pages
        assert harness.kv.used_pages == 0
        assert harness.kv.num_claims == 0
        harness.kv.check_integrity()


@settings(max_examples=250)
@given(
    limits=limits(),
    num_pages=st.integers(3, 30),
    page_size=st.integers(1, 5),
    prefix_caching=st.booleans(),
    num_states=st.sampled_from([0, 0, 3, 4, 8]),
    is_late=st.booleans(),
    events=EVENTS,
)
def test_storms(
    limits: SchedulerLimits,
    num_pages: int,
    page_size: int,
    prefix_caching: bool,
    num_states: int,
    is_late: bool,
    events: list[Event],
) -> None:
    kind = LateShadowPipeline if is_late else ShadowPipeline
    limits = replace(limits, max_num_steps=1) if is_late else limits
    pipeline = kind(num_pages + 1, page_size, prefix_caching=prefix_caching, num_states=num_states)
    storm = Storm(Harness(limits, pipeline))
    for event in events:
        storm.apply(event)
    storm.finish()
    storm.check_results()


@cache
def long_storm(seed: int, is_late: bool = False) -> Storm:
    """Run many requests in a small pool for a long time, which Hypothesis's lists rarely reach."""
    random = Random(seed)
    verbs = ["add"] * 4 + ["pause"] * 2 + ["resume", "cancel"] + ["step"] * 8
    kind = LateShadowPipeline if is_late else ShadowPipeline
    num_slots = (0, 5, 60)[seed % 3]
    num_states = 0 if seed % 5 else 5
    num_pages, caches = random.randint(13, 40), seed % 4 > 0
    pipeline = kind(num_pages, 4, prefix_caching=caches, num_slots=num_slots, num_states=num_states)
    limits = SchedulerLimits(
        max_length=MAX_LENGTH,
        max_batch_size=random.randint(2, 8),
        max_queue_size_tg=random.choice([None, 12]),
        min_batch_size_tg=random.choice([None, 0, 3, 99]),
        ce_delay_ms=random.choice([0.0, 5.0]),
        enable_prioritize_first_decode=random.random() < 0.5,
        max_batch_input_tokens=random.randint(8, 40),
        max_batch_total_tokens=random.choice([None, 64]),
        enable_chunked_prefill=seed % 3 > 0,
        enable_in_flight_batching=seed % 2 > 0,
        kvcache_ce_watermark=random.choice([0.6, 0.95, 1.0]),
        max_num_steps=1 if is_late else random.choice([1, 1, 4]),
        max_active_adapters=(None, 1, 2, 3)[seed % 4],
    )
    storm = Storm(Harness(limits, pipeline))
    for _ in range(250):
        # Mostly the youngest: events for requests that ended long ago have no effect.
        recent = max(0, len(storm.harness.requests) - random.randint(1, 10))
        storm.apply(Event(random.choice(verbs), recent, random.random() < 0.3))
    storm.finish()
    return storm


@pytest.mark.parametrize("seed", range(24))
def test_long_storms(seed: int) -> None:
    long_storm(seed).check_results()


@pytest.mark.parametrize("seed", range(24, 36))
def test_long_storms_planned_ahead(seed: int) -> None:
    storm = long_storm(seed, is_late=True)
    storm.check_results()
    fed = [token for batch in storm.batches for row in batch.rows for token in row.token_ids]
    assert fed.count(FUTURE_TOKEN) > 50


def test_long_storms_reach_all_kinds_of_events() -> None:
    storms = [long_storm(seed) for seed in range(14)]
    modes = {batch.mode for storm in storms for batch in storm.batches}
    assert modes == {ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED}
    assert sum(storm.harness.scheduler.num_preemptions for storm in storms) > 50
    assert sum(storm.harness.kv.prefix_hit_tokens for storm in storms) > 500
    assert sum(storm.harness.kv.num_pages_from_host for storm in storms) > 10
    reasons = [storm.harness.reason(name) for storm in storms for name in storm.harness.requests]
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED}
