"""Streams share the device by the deadlines of their listeners: held sounds, waits of the model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder import (
    AudioDecoder,
    CodecSpec,
    DecodeRequest,
    DecodeResult,
    Renderer,
    StreamingOptions,
)
from llm import Engine, FinishReason, Request, TokenChunk
from tests.fakes import OffsetCodes
from tests.tts.engine.audio_bench import (
    OFFSET,
    Bench,
    EngineLog,
    WatchedDecoder,
    in_loop,
    tokens,
)
from tests.tts.engine.simulated_device import SHAPES, Result, Simulation
from tts.engine import pacer
from tts.engine.client import AudioBlock, SpeechJob
from tts.engine.decode_loop import FEW, DecodeLoop, InFlightBatch
from tts.engine.local_client import LocalEngineClient, StreamLimits
from tts.engine.pacer import IDLE_S, MAX_HOLD_S, DeadlinePacer, DecodePacer
from tts.engine.queue import StreamQueue
from tts.engine.streams import SpeechSetup, SpeechStream

CODE_S = 0.04  # of the ramp codec
SPEC = CodecSpec("none", 8000, Fraction(400), 4096)  # 20 codes a second


def stream_of(options: StreamingOptions) -> SpeechStream:
    """Create a stream of `SPEC`; call it on an event loop."""
    setup = SpeechSetup(SPEC, OffsetCodes(OFFSET), max_codes_ahead=1000)
    queue: StreamQueue[AudioBlock] = StreamQueue(8)
    return SpeechStream(SpeechJob(Request("a", (1,)), options), setup, queue)


def latest_s(options: StreamingOptions, token_s: float) -> float:
    """Generate all blocks token by token, play them from the first on; return the longest delay."""
    sizes = options.chunk_sizes
    assert sizes is not None
    start_s, played, late_s = 0.0, 0, -math.inf
    for block, size in enumerate(sizes):
        codes = played + size + options.look_ahead_of(block)
        complete_s = codes * token_s
        if block == 0:
            start_s = complete_s
        else:
            late_s = max(late_s, complete_s - (start_s + played / 20))
        played += size
    return late_s


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(0, 9),
    st.none() | st.integers(0, 3),
    st.floats(0.001, 0.2),
)
def test_a_held_first_block_makes_no_later_one_late(
    sizes: list[int], look_ahead: int, first: int | None, token_s: float
) -> None:
    options = StreamingOptions(
        tuple(sizes),
        look_ahead=look_ahead,
        first_look_ahead=None if first is None else min(first, look_ahead),
    )

    async def scenario() -> None:
        found_s = stream_of(options).lateness_s(token_s)
        assert found_s == pytest.approx(latest_s(options, token_s))

    in_loop(scenario)


def test_the_first_block_is_held_by_the_speed_of_the_model_only() -> None:
    """20 codes a second in blocks of 4 and 8: at 100 a second none is late, at 35 a second by
    8 / 35 - 4 / 20 s.
    """

    async def scenario() -> None:
        stream = stream_of(StreamingOptions((4, 8)))
        pacer = DeadlinePacer()
        assert pacer.hold_s(stream) == 0.0  # no step was made before
        for step_s, late_s in ((0.01, -math.inf), (1 / 35, 8 / 35 - 4 / 20)):
            for turn in range(200):
                pacer.note_turn(turn * step_s, 1)
            hold_s = max(0.0, late_s + pacer.near_s(1))
            assert pacer.hold_s(stream) == pytest.approx(hold_s, abs=1e-6)
            pacer.note_turn(200 * step_s + IDLE_S, 1)
            assert pacer.hold_s(stream) == 0.0  # how fast it is now is not known
        for turn in range(200):
            pacer.note_turn(1000 + turn * 0.2, 1)
        assert pacer.hold_s(stream) == MAX_HOLD_S
        several = DeadlinePacer()
        for turn in range(200):
            several.note_turn(1000 + turn * 0.04, 4)  # four tokens in each step
        assert several.hold_s(stream) == 0.0

    in_loop(scenario)


def test_a_held_block_is_rendered_later_and_those_of_others_are_not() -> None:
    class HoldingPacer(DeadlinePacer):
        def hold_s(self, stream: SpeechStream) -> float:
            return 0.05 if stream.request_id == "held" else 0.0

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=HoldingPacer())
        held, other = bench.speak("held", sizes=(2, 25)), bench.speak("other", sizes=(2,))
        for task in (held, other):
            tokens(task, 1, 2)
        assert bench.worker.after_step()
        assert (len(held.queue), len(other.queue)) == (0, 1)
        bench.clock.now_s += 0.051
        assert not bench.worker.after_step()
        assert (len(held.queue), len(other.queue)) == (1, 1)

    in_loop(scenario)


def test_the_end_of_a_stream_ends_its_hold() -> None:
    class HoldingPacer(DeadlinePacer):
        def hold_s(self, stream: SpeechStream) -> float:
            return 0.05

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=HoldingPacer())
        task = bench.speak(sizes=(2,))
        tokens(task, 1, 2)
        assert bench.worker.after_step()
        tokens(task, end=FinishReason.STOP)
        bench.worker.after_step()
        assert len(task.queue) >= 1

    in_loop(scenario)


class RenderingForEver(DecodeResult):
    """A result that never comes."""

    took_s = math.inf
    is_ready = False

    def samples(self) -> list[np.ndarray]:
        raise AssertionError("it is not ready")


class CrowdedBench(Bench):
    """Streams with so many codes each, just enough of them to wait while the decoder renders."""

    def __init__(self, codes: int, sizes: tuple[int, ...] | None = (25, 5)) -> None:
        super().__init__(pads=True, pacer=DeadlinePacer())
        self.tasks = [self.speak(str(n), sizes=sizes) for n in range(FEW)]
        for task in self.tasks:
            tokens(task, *range(codes))

    def waits(self, more: int = 0) -> bool:
        """Return whether the model may wait, with so many requests more."""
        self.worker._launched.append(InFlightBatch((), RenderingForEver(), 0.0))
        try:
            return self.worker.may_wait(len(self.tasks) + more, has_step=False)
        finally:
            self.worker._launched.clear()


def test_the_model_waits_while_no_stream_needs_it() -> None:
    """Streams have a second of audio; the next block has five codes of 40 ms."""

    async def scenario() -> None:
        bench = CrowdedBench(25)
        assert not bench.worker.may_wait(FEW, has_step=False)  # the decoder is idle
        assert bench.waits()
        bench.worker.after_step()  # delivers it: now the audio is played
        due_s = min(task.due_s(bench.clock.now_s) for task in bench.tasks)
        assert 0.5 < due_s - bench.clock.now_s < 1.0
        assert bench.waits()
        bench.clock.now_s = due_s - 1e-3
        assert bench.waits()
        bench.clock.now_s = due_s
        assert not bench.waits()

    in_loop(scenario)


def write(bench: CrowdedBench) -> None:
    bench.tasks.append(bench.write())  # type: ignore[arg-type]


def begin(bench: CrowdedBench) -> None:
    """Add a stream with a token, without a block."""
    bench.tasks.append(bench.speak("new"))
    tokens(bench.tasks[-1], 1)


def end_one(bench: CrowdedBench) -> None:
    tokens(bench.tasks.pop(), end=FinishReason.STOP)


@pytest.mark.parametrize("change", [write, begin, end_one], ids=lambda change: change.__name__)
def test_the_model_does_not_wait(change: Callable[[CrowdedBench], None]) -> None:
    """It does for none of a text, a stream without a block, and fewer streams than `FEW`."""

    async def scenario() -> None:
        bench = CrowdedBench(25)
        assert bench.waits()
        change(bench)
        assert not bench.waits()

    in_loop(scenario)


def test_the_model_does_not_wait_while_a_stream_has_replaced_another_one() -> None:
    """The number of requests is the same as before."""

    async def scenario() -> None:
        bench = CrowdedBench(25)
        assert bench.waits()
        end_one(bench)
        begin(bench)
        assert not bench.waits()

    in_loop(scenario)


def test_the_model_does_not_wait_for_audio_in_one_block_nor_with_requests_of_others() -> None:
    async def scenario() -> None:
        assert not CrowdedBench(25, sizes=None).waits()
        assert not CrowdedBench(25).waits(more=1)

    in_loop(scenario)


def test_prompts_wait_for_one_step_at_most() -> None:
    async def scenario() -> None:
        bench = CrowdedBench(25)
        pacer = bench.worker._pacer
        assert pacer is not None
        now_s = bench.clock.now_s
        for turn in range(100):
            pacer.note_turn(now_s - 0.01 * (100 - turn), 1)
        pacer.note_turn(now_s, 1)
        bench.tasks.append(bench.speak("new"))
        assert bench.waits()
        bench.clock.now_s = now_s + 0.009
        assert bench.waits()
        bench.clock.now_s = now_s + 0.0101
        assert not bench.waits()

    in_loop(scenario)


@pytest.mark.parametrize("seed", range(20))
def test_the_model_waits_exactly_until_the_first_stream_is_due(seed: int) -> None:
    """Whatever streams have, at whatever times: as by looking at all of them each time."""
    random = Random(seed)

    async def scenario() -> None:
        bench = CrowdedBench(0)
        for _ in range(60):
            bench.clock.now_s += random.random() * 0.3
            task = random.choice(bench.tasks)
            count = random.randrange(40)
            if count:
                task.on_tokens(TokenChunk(task.request_id, (OFFSET,) * count, output_tokens=count))
            bench.worker.after_step()
            while len(task.queue):
                await task.queue.get()
            bench.worker._waits_until_s = -math.inf  # a step has ended
            now_s = bench.clock.now_s
            pacer = bench.worker._pacer
            assert pacer is not None
            dues_s = [
                pacer.prompts_due_s if each.is_new else each.due_s(now_s) for each in bench.tasks
            ]
            assert bench.waits() == (min(dues_s) > now_s)

    in_loop(scenario)


def simulate(shape: str, streams: int, seed: int = 1) -> Result:
    return asyncio.run(
        Simulation(SHAPES[shape]).run(streams, seconds=1.5, warm_up_s=2.0, seed=seed)
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("shape", "streams"), [("b", 200), ("qwen", 160)])
def test_no_audio_is_late_and_every_stream_ends(shape: str, streams: int, seed: int) -> None:
    found = simulate(shape, streams, seed)
    assert found.late_s
    assert not found.num_late
    assert max(found.first_s) < 0.2


def test_small_urgent_calls_do_not_slow_a_slow_model_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where streams near an underrun do not gather, calls are small and audio is late."""

    def found() -> Result:
        return asyncio.run(Simulation(SHAPES["b"]).run(400, seconds=1.0, warm_up_s=4.5))

    gathered = found()
    monkeypatch.setattr(DeadlinePacer, "gathers", DecodePacer.gathers)
    monkeypatch.setattr(pacer, "URGENT_REST", 0.0)
    hasty = found()
    assert gathered.windows > 1.5 * hasty.windows
    assert gathered.num_late < hasty.num_late / 10


def test_calls_and_steps_are_fuller_with_more_streams() -> None:
    few, many = simulate("b", 20), simulate("b", 160)
    assert many.windows > 3 * few.windows
    assert many.calls_per_s < 2 * few.calls_per_s
    assert many.rows > 5 * few.rows


def test_steps_are_fuller_where_the_model_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting gains little in this simulation, which gives the same figures every time."""
    waiting = simulate("qwen", 192)
    monkeypatch.setattr(DecodeLoop, "may_wait", lambda self, num_live, has_step: False)
    hasty = simulate("qwen", 192)
    assert waiting.rows > 1.03 * hasty.rows
    assert not waiting.num_late


class QuietEngine(EngineLog):
    """An engine that runs nothing."""

    def set_hook(self, hook: DecodeLoop) -> None:
        """Ignore the hook."""

    def start(self) -> None:
        """Start nothing."""


@pytest.mark.parametrize(
    ("device", "by_deadline", "kind"),
    [
        ("parallel", True, DeadlinePacer),
        ("parallel", False, DecodePacer),
        ("cpu", True, None),
        ("cpu", False, None),
    ],
)
def test_streams_are_paced_by_deadline_where_it_is_wanted_and_the_decoder_runs_in_parallel(
    device: str, by_deadline: bool, kind: type[DecodePacer] | None
) -> None:
    decoder = WatchedDecoder()
    decoder.device = device
    limits = StreamLimits(by_deadline=by_deadline)
    client = LocalEngineClient(cast(Engine, QuietEngine()), decoder, OffsetCodes(), limits)
    pacer = client._decode_loop._pacer
    assert (None if pacer is None else type(pacer)) is kind


def test_a_caller_lets_the_engine_start_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class TakingEngine(QuietEngine):
        def submit(self, *_: object, **__: object) -> None:
            calls.append("submit")

    async def scenario() -> None:
        client = LocalEngineClient(cast(Engine, TakingEngine()), WatchedDecoder(), OffsetCodes())
        monkeypatch.setattr(client._decode_loop, "let_start", lambda: calls.append("let_start"))
        stream = client.speak(SpeechJob(Request("a", (1,)), StreamingOptions((2, 3))))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])

    in_loop(scenario)
    assert calls == ["submit", "let_start"]


class CallThatEnds(RenderingForEver):
    """A result that is ready when it is asked the third time."""

    def __init__(self, samples: list[np.ndarray]) -> None:
        self._samples, self._num_asked, self.took_s = samples, 0, 0.01

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        self._num_asked += 1
        return self._num_asked > 2

    def samples(self) -> list[np.ndarray]:
        return self._samples


class AwaitedCall(CallThatEnds):
    """A call that ends when it is waited for."""

    is_ready = False

    def wait(self) -> None:
        self.is_ready = True


class SlowRenderer(Renderer):
    """A renderer whose calls end later."""

    def __init__(
        self, decoder: AudioDecoder, kind: Callable[[list[np.ndarray]], DecodeResult] = CallThatEnds
    ) -> None:
        super().__init__(decoder)
        self._kind = kind

    def launch(self, ready: Sequence[DecodeRequest]) -> DecodeResult:
        return self._kind(super().launch(ready).samples())


def slow_bench(
    sizes: tuple[int, ...] = (2, 25),
    kind: Callable[[list[np.ndarray]], DecodeResult] = CallThatEnds,
) -> tuple[Bench, SpeechStream]:
    bench = Bench(pads=True, pacer=DecodePacer())
    bench.worker._renderer = SlowRenderer(bench.decoder, kind)
    return bench, bench.speak(sizes=sizes)


def test_audio_is_delivered_while_the_model_computes_a_step() -> None:
    async def scenario() -> None:
        bench, task = slow_bench()
        tokens(task, 1, 2)
        assert bench.worker.after_step()
        assert not task.queue
        bench.worker.while_waiting(lambda: True)  # the step has ended
        assert not task.queue
        bench.worker.while_waiting(lambda: False)
        assert len(task.queue) == 1
        assert not bench.worker.after_step()
        bench.worker.while_waiting(lambda: False)  # there is nothing to wait for

    in_loop(scenario)


def test_few_streams_make_way_for_a_first_block() -> None:
    """No step runs in parallel with its call, nor is one started ahead of its last token."""

    async def scenario() -> None:
        bench, task = slow_bench(sizes=(2, 2))
        may_wait = bench.worker.may_wait
        assert not may_wait(1, has_step=True)  # two tokens are missing
        tokens(task, 1)
        assert may_wait(1, has_step=True)
        assert not may_wait(1, has_step=False)  # or it would never come
        tokens(task, 2)
        assert not may_wait(1, has_step=True)
        bench.worker.after_step()
        assert may_wait(1, has_step=False)
        assert not may_wait(2, has_step=False)  # another request is no stream of speech
        other = bench.write()
        assert not may_wait(2, has_step=False)
        bench.worker.remove(other)
        bench.worker.while_waiting(lambda: False)
        assert len(task.queue) == 1
        tokens(task, 3)
        assert not may_wait(1, has_step=True)  # its listener has audio
        tokens(task, 4)
        bench.worker.after_step()
        assert bench.worker._launched
        assert not may_wait(1, has_step=False)

    in_loop(scenario)


def test_a_first_block_that_the_model_makes_way_for_is_waited_for() -> None:
    """It is delivered in the turn that launches it; a later block is not waited for."""

    async def scenario() -> None:
        bench, task = slow_bench((2, 2), AwaitedCall)
        tokens(task, 1)
        assert bench.worker.may_wait(1, has_step=True)
        tokens(task, 2)
        assert not bench.worker.after_step()
        assert len(task.queue) == 1
        tokens(task, 3, 4)
        assert not bench.worker.may_wait(1, has_step=False)
        assert bench.worker.after_step()
        assert len(task.queue) == 1

    in_loop(scenario)


def test_a_first_block_is_not_waited_for_while_the_model_may_compute() -> None:
    async def scenario() -> None:
        bench, task = slow_bench((2, 2), AwaitedCall)
        bench.write()
        tokens(task, 1)
        assert not bench.worker.may_wait(2, has_step=True)  # for the text
        tokens(task, 2)
        assert bench.worker.after_step()
        assert not task.queue

    in_loop(scenario)


def test_many_streams_do_not_make_way() -> None:
    async def scenario() -> None:
        bench, task = slow_bench()
        others = [bench.speak(str(n)) for n in range(FEW - 1)]
        tokens(task, 1, 2)
        bench.worker.after_step()
        assert not bench.worker.may_wait(1 + len(others), has_step=False)
        bench.worker.remove(others.pop())
        assert bench.worker.may_wait(1 + len(others), has_step=False)

    in_loop(scenario)
