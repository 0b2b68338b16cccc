"""The engine: threads, tokens, isolated failures, and sleep while idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from llm.batch import ScheduledBatch, StepOutput
from llm.engine.engine import Engine, TokenStream
from llm.errors import EngineStoppedError, QueueFullError, RequestError
from llm.request import FinishReason, Request, SamplingParams, TokenChunk
from llm.scheduler import Scheduler, SchedulerLimits
from tests.llm.scheduler.shadow import (
    EOS,
    VOCAB_SIZE,
    LateShadowPipeline,
    ShadowPipeline,
    expected_output,
)


class SlowPipeline(ShadowPipeline):
    """A shadow pipeline whose steps wait for a permit while `gate` is closed."""

    def __init__(self, num_pages: int = 200, step_s: float = 0.0) -> None:
        super().__init__(num_pages, 4)
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.step_s = step_s

    def execute(self, batch: ScheduledBatch, /) -> StepOutput:
        self.started.release()
        assert self.gate.wait(60)
        time.sleep(self.step_s)
        return super().execute(batch)


class CountingHook:
    """Does `work` pieces of work, one per call."""

    def __init__(self, work: int = 0) -> None:
        self.work = work
        self.poll_s = 0.0
        self.calls = 0
        self.stops = 0
        self.threads: set[str] = set()
        self.waits = threading.Event()  # the model waits for the hook
        self.live: list[int] = []

    def after_step(self, num_tokens: int, /) -> bool:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        self.work -= 1
        return self.work >= 0

    def may_wait(self, num_live: int, has_step: bool) -> bool:
        self.live.append(num_live)
        return self.waits.is_set()

    def while_waiting(self, is_done: Callable[[], bool]) -> None:
        self.threads.add(threading.current_thread().name)

    def on_stop(self) -> None:
        self.stops += 1


class Rig:
    """An engine and its parts."""

    def __init__(self, **options: int) -> None:
        self.pipeline = SlowPipeline()
        self.hook = CountingHook()
        self.limits = SchedulerLimits(max_batch_size=8, max_batch_input_tokens=32)
        self.scheduler = Scheduler(self.limits, self.pipeline.kv_manager, max_seq_len=1000)
        self.engine = Engine(self.pipeline, self.scheduler, self.hook, **options)
        self.engine.start()

    def check_clean(self) -> None:
        """Check that nothing runs or is held, and that all counts are consistent."""
        assert self.engine.run_on_engine(self.scheduler.num_live.__int__).result(60) == 0
        self.engine.run_on_engine(self.scheduler.check_integrity).result(60)
        assert self.engine.stats().used_pages == 0


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.pipeline.gate.set()
    made.engine.shutdown()
    assert not made.engine.is_running
    assert made.hook.stops == 1


def request(name: str, prompt_len: int = 6, **sampling: object) -> Request:
    params = SamplingParams(**({"max_tokens": 12} | sampling))  # type: ignore[arg-type]
    first = 1 + len(name) + ord(name[-1]) % 7
    return Request(name, tuple(first + index % 40 for index in range(prompt_len)), params)


def with_eos(made: Request) -> Request:
    params = SamplingParams(max_tokens=made.sampling.max_tokens, stop_token_ids=(EOS,))
    return Request(made.request_id, made.prompt_ids, params)


def endless(name: str) -> Request:
    return request(name, max_tokens=700, ignore_eos=True)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def paused_after_a_step(rig: Rig, name: str) -> TokenStream:
    """Return an endless request that has its first token and takes part in no further step."""
    while rig.pipeline.started.acquire(blocking=False):
        pass  # a step of an earlier request
    rig.pipeline.gate.clear()
    stream = rig.engine.submit(endless(name))
    assert rig.pipeline.started.acquire(timeout=60)
    rig.engine.pause(name)
    rig.pipeline.gate.set()
    wait_for(lambda: rig.engine.stats().paused == 1)
    return stream


def test_a_stream_yields_the_tokens_of_the_request(rig: Rig) -> None:
    made = request("a")
    chunks = list(rig.engine.submit(made))
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    last = chunks[-1]
    assert (tokens, last.finish_reason, last.output_tokens) == expected_output(with_eos(made))
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    rig.check_clean()
    assert rig.pipeline.released == ["a"]


def test_many_threads_submit_at_once(rig: Rig) -> None:
    results: dict[str, list[TokenChunk]] = {}

    def client(name: str) -> None:
        results[name] = list(rig.engine.submit(request(name)))

    names = [f"{index:02}" for index in range(30)]
    clients = [threading.Thread(target=client, args=(name,)) for name in names]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(60)
    for name in names:
        tokens = [token for chunk in results[name] for token in chunk.token_ids]
        assert tokens == expected_output(with_eos(request(name)))[0]
    assert max(len(batch.rows) for batch in rig.pipeline.batches) > 1
    rig.check_clean()


def test_a_sink_is_called_on_the_engine_thread(rig: Rig) -> None:
    chunks: list[TokenChunk] = []
    threads, done = set(), threading.Event()

    def sink(chunk: TokenChunk) -> None:
        threads.add(threading.current_thread().name)
        chunks.append(chunk)
        if chunk.finish_reason is not None:
            done.set()

    rig.engine.submit(request("a"), sink)
    assert done.wait(60)
    assert threads == {"engine"}
    assert [t for c in chunks for t in c.token_ids] == expected_output(with_eos(request("a")))[0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Request("a", (1, VOCAB_SIZE)), "prompt id is not in the vocabulary of 64"),
        (Request("a", (-1,)), "prompt id is not in the vocabulary of 64"),
        (Request("a", (1,) * 1000), "has 1000 tokens; at most 999 fit"),
        (
            Request("a", (1,) * 900, SamplingParams(max_tokens=200, min_tokens=101)),
            "900 tokens and min_tokens is 101; together at most 1000 fit",
        ),
        (request("a", stop_token_ids=(64,)), "stop id is not in the vocabulary"),
        (request("a", allowed_ranges=((3, 65),)), "allowed ranges go beyond"),
        (request("a", allowed_cycle=(((3, 9),), ((9, 65),))), "allowed ranges go beyond"),
        (request("a", top_logprobs=65), "top_logprobs exceeds"),
        (Request("a", (1,), priority=10**400), "priority must be within"),
    ],
)
def test_requests_that_cannot_run_are_refused(rig: Rig, made: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rig.engine.submit(made)
    assert list(rig.engine.submit(request("a")))[-1].finish_reason is not FinishReason.ERROR


def test_an_id_can_be_used_again_once_its_last_chunk_is_out(rig: Rig) -> None:
    stream = rig.engine.submit(endless("a"))
    with pytest.raises(RequestError, match="a is in use already"):
        rig.engine.submit(request("a"))
    stream.cancel()
    assert list(stream)[-1].finish_reason is FinishReason.CANCELLED
    assert list(rig.engine.submit(request("a")))[-1].finish_reason is not FinishReason.CANCELLED


def test_the_models_stop_ids_count_unless_ruled_out(rig: Rig) -> None:
    streams = {
        "plain": rig.engine.submit(request("plain", max_tokens=400)),
        "ranges": rig.engine.submit(request("ranges", max_tokens=400, allowed_ranges=((1, 9),))),
    }
    reasons = {name: list(stream)[-1].finish_reason for name, stream in streams.items()}
    assert reasons == {"plain": FinishReason.STOP, "ranges": FinishReason.LENGTH}


def test_cancel_takes_effect_within_a_step(rig: Rig) -> None:
    rig.pipeline.gate.clear()
    stream = rig.engine.submit(endless("a"))
    assert rig.pipeline.started.acquire(timeout=60)
    stream.cancel()
    rig.pipeline.gate.set()
    # The running step may still deliver; no other step runs.
    assert len([chunk for chunk in stream if chunk.token_ids]) <= 1
    assert len(rig.pipeline.batches) == 1
    rig.engine.cancel("a")
    rig.check_clean()


def test_a_cancel_right_after_the_submit_is_not_lost(rig: Rig) -> None:
    for index in range(50):
        stream = rig.engine.submit(endless(f"r{index}"))
        stream.cancel()
        assert list(stream)[-1].finish_reason is FinishReason.CANCELLED
    rig.check_clean()


def test_pause_and_resume(rig: Rig) -> None:
    stream = paused_after_a_step(rig, "a")
    first = next(stream)
    steps = rig.engine.stats().steps
    assert list(rig.engine.submit(request("b")))[-1].finish_reason
    assert rig.engine.stats().used_pages > 0
    assert rig.engine.stats().steps > steps
    rig.engine.resume("a")
    tokens = [*first.token_ids, *(token for chunk in stream for token in chunk.token_ids)]
    params = SamplingParams(max_tokens=700, ignore_eos=True, stop_token_ids=(EOS,))
    assert tokens == expected_output(Request("a", endless("a").prompt_ids, params))[0]


def test_a_failed_step_fails_its_batch_and_the_engine_continues(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.pipeline.fail_next = True
    with caplog.at_level(logging.ERROR):
        chunks = list(rig.engine.submit(request("a")))
    assert chunks[-1].finish_reason is FinishReason.ERROR
    assert "the device is out of memory" in chunks[-1].error
    assert "a step failed: 1 rows, 6 tokens fed, 6 in context" in caplog.text
    assert any(getattr(r, "fields", None) == (("request_ids", ["a"]),) for r in caplog.records)
    assert list(rig.engine.submit(request("b")))[-1].finish_reason is not FinishReason.ERROR
    assert rig.engine.stats().failed_steps == 1
    rig.check_clean()


def test_a_sink_that_raises_loses_its_request_only(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def sink(chunk: TokenChunk) -> None:
        raise ConnectionError("the reader has gone")

    rig.engine.submit(endless("a"), sink)
    assert list(rig.engine.submit(request("b")))[-1].finish_reason is not FinishReason.ERROR
    wait_for(lambda: "a" in rig.pipeline.released)
    assert "raised on the engine thread" in caplog.text
    rig.check_clean()


def test_the_hook_runs_after_steps_and_when_woken(rig: Rig) -> None:
    list(rig.engine.submit(request("a")))
    rig.engine.run_on_engine(lambda: None).result(60)
    assert rig.hook.calls >= len(rig.pipeline.batches)
    wait_for(lambda: rig.engine.drain(0.0))
    calls = rig.hook.calls
    rig.hook.work = 3
    rig.engine.wake()
    wait_for(lambda: rig.hook.calls == calls + 4)  # it continues as long as there is work
    assert rig.hook.threads == {"engine"}
    with pytest.raises(RuntimeError, match="before the engine starts"):
        rig.engine.set_hook(None)


def test_no_step_starts_while_the_model_may_wait(rig: Rig) -> None:
    rig.hook.waits.set()
    rig.hook.work = 10**9  # the engine does not sleep
    stream = rig.engine.submit(request("a"))
    while 1 not in rig.hook.live:
        time.sleep(0.001)
    assert not rig.pipeline.started.acquire(timeout=0.05)
    rig.hook.waits.clear()
    assert list(stream)[-1].finish_reason is FinishReason.LENGTH
    rig.hook.work = 0
    rig.check_clean()


def test_a_step_follows_when_the_hook_has_done_what_the_model_waited_for(rig: Rig) -> None:
    """The hook reports no more work in the turn in which the model has waited."""
    rig.hook.waits.set()
    after_step = rig.hook.after_step

    def finish(num_tokens: int, /) -> bool:
        rig.hook.waits.clear()
        return after_step(num_tokens)

    rig.hook.after_step = finish  # type: ignore[method-assign]
    assert list(rig.engine.submit(request("a")))[-1].finish_reason is FinishReason.LENGTH
    rig.check_clean()


def test_a_hook_that_raises_does_not_make_the_model_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rig.hook, "may_wait", lambda num_live, has_step: 1 / 0)
    assert list(rig.engine.submit(request("a")))[-1].finish_reason is FinishReason.LENGTH
    assert "ZeroDivisionError" in caplog.text


def test_the_hook_works_while_the_engine_waits_for_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It knows which turns wait for results; a hook that raises costs no token."""

    class LateHook(CountingHook):
        def __init__(self) -> None:
            super().__init__()
            self.num_waits = 0
            self.with_step: list[bool] = []

        def may_wait(self, num_live: int, has_step: bool) -> bool:
            self.with_step.append(has_step)
            return False

        def while_waiting(self, is_done: Callable[[], bool]) -> None:
            assert is_done()
            self.num_waits += 1
            if self.num_waits == 2:
                raise ZeroDivisionError

    pipeline, hook = LateShadowPipeline(), LateHook()
    limits = SchedulerLimits(max_batch_size=8, max_batch_input_tokens=32)
    scheduler = Scheduler(limits, pipeline.kv_manager, max_seq_len=1000, plan_ahead=True)
    engine = Engine(pipeline, scheduler, hook)
    engine.start()
    try:
        chunks = list(engine.submit(request("a", max_tokens=5)))
    finally:
        engine.shutdown()
    assert chunks[-1].output_tokens == 5
    assert hook.num_waits == 5
    assert sum(hook.with_step) == 5
    assert not hook.with_step[0]
    assert "ZeroDivisionError" in caplog.text


def test_an_idle_engine_sleeps(rig: Rig) -> None:
    list(rig.engine.submit(request("a")))
    next(paused_after_a_step(rig, "paused"))
    time.sleep(0.05)
    calls, cpu_s = rig.hook.calls, time.process_time()
    time.sleep(0.3)
    assert rig.hook.calls == calls
    assert time.process_time() - cpu_s < 0.1


def test_run_on_engine(rig: Rig) -> None:
    name = rig.engine.run_on_engine(lambda: threading.current_thread().name)
    assert name.result(60) == "engine"
    with pytest.raises(ZeroDivisionError):
        rig.engine.run_on_engine(lambda: 1 // 0).result(60)
    rig.check_clean()


def test_drain_waits_for_requests_and_the_hook(rig: Rig) -> None:
    rig.pipeline.step_s = 0.002
    stream = rig.engine.submit(request("a", max_tokens=30, ignore_eos=True))
    rig.hook.work = 40
    assert rig.engine.drain(60)
    assert rig.hook.work < 0
    assert list(stream)[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineStoppedError):
        rig.engine.submit(request("b"))


def test_drain_gives_up_in_time(rig: Rig) -> None:
    stream = rig.engine.submit(endless("a"))
    rig.pipeline.step_s = 0.02
    assert not rig.engine.drain(0.05)
    rig.engine.shutdown()
    assert list(stream)[-1].finish_reason is FinishReason.CANCELLED


def test_shutdown_ends_everything_and_can_be_repeated() -> None:
    rig = Rig()
    rig.pipeline.gate.clear()
    running = rig.engine.submit(endless("a"))
    assert rig.pipeline.started.acquire(timeout=60)
    in_the_inbox = rig.engine.submit(endless("b"))
    future = rig.engine.run_on_engine(lambda: 5)
    rig.pipeline.gate.set()
    rig.engine.shutdown()
    rig.engine.shutdown()
    for stream in (running, in_the_inbox):
        assert list(stream)[-1].finish_reason is FinishReason.CANCELLED
    assert future.result(0) == 5
    assert rig.hook.stops == 1
    assert rig.engine.stats().used_pages == 0
    with pytest.raises(EngineStoppedError):
        rig.engine.submit(request("c"))
    with pytest.raises(EngineStoppedError):
        rig.engine.run_on_engine(lambda: None)
    rig.engine.cancel("a")  # too late, without effect
    assert rig.engine.drain(60)


def test_an_engine_that_never_started_can_be_shut_down() -> None:
    pipeline = SlowPipeline()
    engine = Engine(pipeline, Scheduler(SchedulerLimits(), pipeline.kv_manager))
    stream = engine.submit(request("a"))
    engine.shutdown()
    assert list(stream)[-1].finish_reason is FinishReason.CANCELLED
    with pytest.raises(EngineStoppedError):
        engine.start()
    assert repr(engine).startswith("Engine(stopped, Scheduler(idle, SequenceTable(0 pending")


def test_a_failed_loop_ends_all_requests_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    stream = rig.engine.submit(endless("a"))
    next(stream)
    rig.engine.run_on_engine(rig.scheduler.schedule)  # this batch is never committed
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "neither committed nor failed" in last.error
    wait_for(lambda: not rig.engine.is_running)
    with pytest.raises(EngineStoppedError):
        rig.engine.submit(request("b"))
    assert "the engine failed and has stopped" in caplog.text
    rig.engine.shutdown()


def test_the_queue_bound() -> None:
    rig = Rig(max_waiting=2)
    rig.pipeline.gate.clear()
    streams = [rig.engine.submit(endless("a"))]
    assert rig.pipeline.started.acquire(timeout=60)
    streams += [rig.engine.submit(endless(name)) for name in "bc"]
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        rig.engine.submit(endless("d"))
    assert (rig.engine.stats().running, rig.engine.stats().waiting) == (1, 2)
    rig.pipeline.gate.set()
    wait_for(lambda: rig.engine.stats().waiting == 0)
    streams.append(rig.engine.submit(endless("d")))
    rig.engine.shutdown()
    assert all(list(stream)[-1].finish_reason is FinishReason.CANCELLED for stream in streams)


def test_stats_count(rig: Rig) -> None:
    for name in ("a", "b"):
        list(rig.engine.submit(Request(name, tuple(range(1, 22)), SamplingParams(max_tokens=1))))
    stats = rig.engine.stats()
    assert (stats.steps, stats.input_tokens) == (2, 21 + 1)
    assert (stats.prefix_hit_tokens, stats.prefix_miss_tokens) == (20, 22)
    assert (stats.running, stats.waiting, stats.paused, stats.used_pages) == (0, 0, 0, 0)
    assert (stats.cached_pages, stats.total_pages, stats.preemptions) == (5, 199, 0)
