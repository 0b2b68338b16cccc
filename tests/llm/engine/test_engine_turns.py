"""The engine between steps: delayed prefills, and steps without rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llm.batch import ScheduledBatch, StepOutput
from llm.engine.engine import Engine, TokenStream, create_engine
from llm.errors import CapacityError, EngineStoppedError
from llm.request import FinishReason, Request, SamplingParams
from llm.scheduler import Scheduler, SchedulerLimits
from tests.llm.engine.test_create_engine import config
from tests.llm.engine.test_engine import Rig, SlowPipeline, wait_for
from tests.llm.scheduler.shadow import ShadowPipeline


class EmptyStepPipeline(ShadowPipeline):
    """A shadow pipeline that counts steps without rows; the fifth is the signal."""

    def __init__(self) -> None:
        super().__init__(100, 4)
        self.num_empty = 0
        self.enough = threading.Event()
        self.fail_empty = False

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        if batch:
            return super().execute(batch)
        self.num_empty += 1
        if self.num_empty == 5:
            self.enough.set()
        if self.fail_empty:
            raise CapacityError("no room for nothing")
        return StepOutput({})


@contextmanager
def running(pipeline: ShadowPipeline, *, empty: bool = False, **limits: object) -> Iterator[Engine]:
    made = SchedulerLimits(**limits)  # type: ignore[arg-type]
    scheduler = Scheduler(made, pipeline.kv_manager)
    engine = Engine(pipeline, scheduler, execute_empty_batches=empty)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


def request(name: str) -> Request:
    return Request(name, (1, 2, 3, ord(name) % 60), SamplingParams(max_tokens=3, ignore_eos=True))


def test_a_prefill_that_waits_starts_when_the_time_is_up() -> None:
    pipeline = ShadowPipeline(100, 4)
    with running(pipeline, ce_delay_ms=20.0) as engine:
        started = time.monotonic()
        chunks = list(engine.submit(request("a")))
        assert time.monotonic() - started >= 0.02
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert chunks[0].queue_s is not None
    assert chunks[0].queue_s >= 0.02
    assert len(pipeline.batches) == 3, "decode steps do not wait"


def test_a_prefill_that_waits_starts_at_once_when_it_is_full() -> None:
    pipeline = ShadowPipeline(100, 4)
    with running(pipeline, ce_delay_ms=60_000.0, max_batch_size=2) as engine:
        streams = [engine.submit(request(name)) for name in "ab"]
        assert all(list(s)[-1].finish_reason is FinishReason.LENGTH for s in streams)
    assert [row.request_id for row in pipeline.batches[0].rows] == ["a", "b"]


def test_a_delayed_prefill_delays_no_other_request() -> None:
    with running(ShadowPipeline(100, 4), ce_delay_ms=60_000.0) as engine:
        stream = engine.submit(request("a"))
        engine.cancel("a")
        assert [chunk.finish_reason for chunk in stream] == [FinishReason.CANCELLED]
        engine.submit(request("b"))
    assert not engine.is_running


def test_steps_without_rows_run_while_the_engine_is_idle() -> None:
    pipeline = EmptyStepPipeline()
    with running(pipeline, empty=True) as engine:
        assert pipeline.enough.wait(60)
        assert list(engine.submit(request("a")))[-1].finish_reason is FinishReason.LENGTH
        stats = engine.stats()
        assert (stats.steps, stats.empty_steps >= 5) == (3, True)
        assert engine.drain(60)


def test_without_the_switch_an_idle_engine_sleeps() -> None:
    pipeline = EmptyStepPipeline()
    with running(pipeline) as engine:
        list(engine.submit(request("a")))
        assert engine.drain(60)
        assert (pipeline.num_empty, engine.stats().empty_steps) == (0, 0)


def test_a_step_without_rows_that_fails_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = EmptyStepPipeline()
    pipeline.fail_empty = True
    with running(pipeline, empty=True) as engine:
        for name in "ab":
            assert list(engine.submit(request(name)))[-1].finish_reason is FinishReason.LENGTH
        assert engine.drain(60)
    assert pipeline.num_empty == 1
    assert "no room for nothing" in caplog.text


def test_an_idle_model_runs_forwards(tiny_checkpoint: Path) -> None:
    engine = create_engine(config(tiny_checkpoint, execute_empty_batches=True))
    forwards = engine.pipeline.runner  # type: ignore[attr-defined]
    engine.start()
    deadline = time.monotonic() + 60
    while forwards.forward_pass_id < 3:
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
    engine.shutdown()


def test_a_device_that_is_lost_ends_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Running and waiting requests get an error, and new requests are refused."""
    pipeline = ShadowPipeline(100, 4)
    pipeline.dies = pipeline.fail_next = True
    scheduler = Scheduler(SchedulerLimits(max_batch_size=1), pipeline.kv_manager)
    engine = Engine(pipeline, scheduler)
    streams = [engine.submit(request(name)) for name in "ab"]
    engine.start()
    ends = [list(stream)[-1] for stream in streams]
    assert [end.finish_reason for end in ends] == [FinishReason.ERROR] * 2
    assert "the model failed" in ends[0].error
    assert "the device is lost" in ends[1].error
    with pytest.raises(EngineStoppedError):
        engine.submit(request("c"))
    engine.shutdown()
    assert not engine.is_running
    assert "the device is lost" in caplog.text


def test_no_batch_is_larger_than_the_cap() -> None:
    pipeline = ShadowPipeline(100, 4)
    with running(pipeline, max_batch_size=4) as engine:
        for stream in [engine.submit(request(name)) for name in "abcdefghij"]:
            list(stream)
        batches = engine.stats().batches
    for counts in batches:
        sizes = zip(counts.rows.bounds, counts.rows.counts, strict=False)
        assert sum(count for bound, count in sizes if bound > 4) == 0
    assert sum(counts.rows.total for counts in batches) == 10 * 3


@pytest.mark.parametrize(("steps", "turns"), [(1, 20), (10, 3)])
def test_several_steps_a_turn_are_fewer_turns(
    tiny_checkpoint: Path, steps: int, turns: int
) -> None:
    """A prefill, then nineteen tokens."""
    engine = create_engine(config(tiny_checkpoint, max_num_steps=steps))
    engine.start()
    made = SamplingParams(seed=4, max_tokens=20, ignore_eos=True)
    chunks = list(engine.submit(Request("a", tuple(range(30)), made)))
    engine.shutdown()
    assert (engine.stats().steps, chunks[-1].output_tokens) == (turns, 20)


class Census(ShadowPipeline):
    """A shadow pipeline that records the requests in the scheduler at each step."""

    def __init__(self) -> None:
        super().__init__(200, 4)
        self.scheduler: Scheduler | None = None
        self.counts: list[int] = []

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        assert self.scheduler is not None
        self.counts.append(self.scheduler.num_live)
        return super().execute(batch)


def crowd_of_twenty() -> tuple[Census, Engine, list[TokenStream]]:
    """Return an engine that has not started, and twenty requests that have arrived."""
    pipeline = Census()
    limits = SchedulerLimits(max_batch_size=3, min_batch_size_tg=0, enable_in_flight_batching=False)
    pipeline.scheduler = Scheduler(limits, pipeline.kv_manager)
    engine = Engine(pipeline, pipeline.scheduler)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    streams = [engine.submit(Request(f"r{n}", (1, 2, n + 3), sampling)) for n in range(20)]
    return pipeline, engine, streams


def test_two_batches_of_requests_enter_in_one_turn() -> None:
    pipeline, engine, streams = crowd_of_twenty()
    assert engine.stats().waiting == 20
    engine.start()
    ends = [list(stream)[-1] for stream in streams]
    engine.shutdown()
    assert pipeline.counts[:5] == [6, 12, 18, 20, 20]
    assert {end.finish_reason for end in ends} == {FinishReason.LENGTH}


def test_commands_admit_their_request_at_once() -> None:
    pipeline, engine, streams = crowd_of_twenty()
    engine.cancel("r19")
    engine.pause("r18")
    engine.start()
    assert [chunk.finish_reason for chunk in streams[19]] == [FinishReason.CANCELLED]
    assert pipeline.counts[:1] in ([], [7])  # of the cancelled and the paused one, the latter
    engine.resume("r18")
    assert list(streams[18])[-1].finish_reason is FinishReason.LENGTH
    engine.shutdown()


def test_requests_that_were_not_admitted_get_an_error_at_shutdown() -> None:
    _, engine, streams = crowd_of_twenty()
    engine.shutdown()
    assert {list(stream)[-1].finish_reason for stream in streams} == {FinishReason.CANCELLED}


def test_a_late_cancel_does_not_affect_a_later_request_of_the_same_id() -> None:
    """A reader cancels when its request has just ended, and the id is used again at once."""
    _, engine, _ = crowd_of_twenty()
    engine.cancel("again")
    engine.pause("again")
    stream = engine.submit(request("z"))
    engine.cancel("z and more")
    again = engine.submit(Request("again", (1, 2, 60), SamplingParams(max_tokens=2)))
    engine.start()
    assert list(stream)[-1].finish_reason is FinishReason.LENGTH
    assert list(again)[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    engine.shutdown()


def test_the_duration_of_a_turn_is_reported_while_it_runs() -> None:
    pipeline = SlowPipeline()
    with running(pipeline) as engine:
        wait_for(lambda: engine.stats().turn_s == 0)
        pipeline.gate.clear()
        stream = engine.submit(request("a"))
        wait_for(lambda: engine.stats().turn_s > 0.05)
        pipeline.gate.set()
        assert list(stream)[-1].finish_reason is FinishReason.LENGTH
        wait_for(lambda: engine.stats().turn_s == 0)


def test_a_hook_is_asked_now_and_then_while_another_device_works() -> None:
    rig = Rig()
    rig.hook.poll_s, rig.hook.work = 0.02, 10**9
    rig.engine.wake()
    wait_for(lambda: rig.hook.calls > 3)
    calls, began_s = rig.hook.calls, time.monotonic()
    wait_for(lambda: rig.hook.calls >= calls + 10)
    assert time.monotonic() - began_s >= 8 * rig.hook.poll_s, "it sleeps in between"
    rig.hook.poll_s = 1000.0
    list(rig.engine.submit(request("a")))  # which does not wait for that
    rig.engine.shutdown()
