"""Faults of the local engine client: readers that stop or lag, failing decoders, closing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from decoder import AudioDecoder, DecodeWindow, StreamingOptions
from llm import EngineStoppedError, FinishReason
from llm.models import session
from tests.deadlines import HANG_S
from tests.fakes import StepLog, wait_until_idle
from tests.tts.engine.jobs import HOP, listen, read, run, samples, speech, text
from tts.engine import queue
from tts.engine.client import Hold
from tts.engine.local_client import LocalEngineClient, StreamLimits
from tts.errors import SlowReaderError


def test_many_cancellations_leave_no_stream_or_page(engine_client: LocalEngineClient) -> None:
    chance = random.Random(0)

    async def one(number: int) -> None:
        job = speech(f"storm-{number}", exactly=400)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(listen(engine_client, job), chance.uniform(0.0, 0.15))

    async def scenario() -> None:
        await asyncio.gather(*(one(number) for number in range(100)))
        await wait_until_idle(engine_client)
        blocks = await listen(engine_client, speech("after", exactly=5))
        assert len(samples(blocks)) == 5 * HOP

    run(scenario)


def test_closing_a_stream_early_cancels_within_a_step(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    log = StepLog()
    client = own_client(step_log=log)

    async def scenario() -> None:
        stream = client.speak(speech("early", exactly=400))
        assert (await anext(stream)).num_codes == 2
        await stream.aclose()  # type: ignore[attr-defined]
        steps = len(log.steps)
        await wait_until_idle(client)
        assert sum("early" in rows for rows in log.steps[steps:]) <= 2

    run(scenario)


def test_a_slow_reader_is_paused_while_others_continue(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    log = StepLog()
    client = own_client(step_log=log, limits=StreamLimits(audio_blocks=2, codes_ahead=16))
    cut = StreamingOptions((4,), buffer=4)

    async def scenario() -> None:
        slow = client.speak(speech("slow", exactly=200, streaming=cut))
        heard = [await anext(slow)]
        for n in range(3):
            blocks = await listen(client, speech(f"fast-{n}", exactly=100))
            assert len(samples(blocks)) == 100 * HOP
        # one block read, two queued, 16 codes waiting, and one turn to notice
        assert log.count("slow") <= 4 + 2 * 4 + 16 + 4
        heard += [block async for block in slow]
        assert [block.first_code for block in heard] == list(range(0, 201, 4))[: len(heard)]
        assert len(samples(heard)) == 200 * HOP

    run(scenario)


def test_pages_are_free_after_generation_although_audio_is_unread(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    """The language model has finished but its audio has not: the sequence is already freed."""
    client = own_client(limits=StreamLimits(audio_blocks=1, codes_ahead=1000))

    async def scenario() -> None:
        stream = client.speak(speech("long", exactly=60, streaming=StreamingOptions((4,))))
        heard = [await anext(stream)]
        for _ in range(6000):
            status = await client.status()
            if not status.running:
                break
            await asyncio.sleep(0.01)
        assert (status.running, status.used_pages, status.audio_streams) == (0, 0, 1)
        assert len(heard) == 1
        heard += [block async for block in stream]
        assert len(samples(heard)) == 60 * HOP

    run(scenario)


def test_a_slow_reader_of_text_is_paused(own_client: Callable[..., LocalEngineClient]) -> None:
    log = StepLog()
    client = own_client(step_log=log, limits=StreamLimits(text_chunks=4))

    async def scenario() -> None:
        stream = client.generate(text("slow", exactly=100))
        chunks = [await anext(stream)]
        await listen(client, speech("fast", exactly=60))
        assert log.count("slow") <= 4 + 4
        chunks += [chunk async for chunk in stream]
        assert chunks[-1].output_tokens == 100

    run(scenario)


def test_a_held_step_waits_and_others_do_not(
    own_client: Callable[..., LocalEngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held text that is alone stops within its step; not so with another that runs."""
    monkeypatch.setattr(session, "LONGEST_HOLD_S", HANG_S)
    client = own_client()

    async def scenario() -> None:
        hold = Hold()
        held = client.generate(text("held", exactly=200), hold)
        count = len([await anext(held)])
        client.engine.hold(is_held=True)
        while client.engine.stats().turn_s < 0.1:
            await asyncio.sleep(0.01)
        client.engine.hold(is_held=False)
        hold.set(is_set=True)
        for name in ("one", "two"):
            assert (await read(client, text(name, exactly=60)))[-1].output_tokens == 60
        hold.set(is_set=False)
        count += len([chunk async for chunk in held])
        assert count == 200
        gone = client.generate(text("gone", exactly=200), hold := Hold())
        await anext(gone)
        hold.set(is_set=True)
        await gone.aclose()
        assert await read(client, text("after", exactly=20))

    run(scenario)


def test_a_held_text_that_has_ended_holds_no_step(
    own_client: Callable[..., LocalEngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader has not read the end yet, and a new text is the only one that runs."""
    monkeypatch.setattr(session, "LONGEST_HOLD_S", HANG_S)
    client = own_client()

    async def scenario() -> None:
        hold = Hold()
        held = client.generate(text("held", exactly=20), hold)
        count = len([await anext(held)])
        assert await asyncio.to_thread(client._decode_loop.wait_idle, HANG_S)
        hold.set(is_set=True)
        assert (await read(client, text("new", exactly=20)))[-1].output_tokens == 20
        count += len([chunk async for chunk in held])
        assert count == 20

    run(scenario)


def test_a_hold_has_an_end(
    own_client: Callable[..., LocalEngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LONGEST_HOLD_S", 0.01)
    client = own_client()

    async def scenario() -> None:
        client.engine.hold(is_held=True)
        assert (await read(client, text("t", exactly=20)))[-1].output_tokens == 20

    run(scenario)


def test_the_stream_of_a_stalled_reader_is_cancelled(
    own_client: Callable[..., LocalEngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the queue stands still until the reader has stopped."""
    clock = SimpleNamespace(now_s=1000.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(queue, "time", clock)
    client = own_client(limits=StreamLimits(audio_blocks=2, codes_ahead=8, reader_timeout_s=0.2))

    async def scenario() -> None:
        gone = client.speak(speech("gone", exactly=400))
        await anext(gone)
        while not (await client.status()).stats.paused:
            await asyncio.sleep(0.01)
        clock.now_s += 1
        await wait_until_idle(client)  # without the reader's help
        with pytest.raises(SlowReaderError, match=r"0\.2 s"):
            await anext(gone)
        assert await listen(client, speech("next", max_tokens=4))

    run(scenario)


class BreakingDecoder(AudioDecoder):
    """A real decoder whose calls fail once a window holds more than `longest` codes."""

    def __init__(self, inner: AudioDecoder, longest: int) -> None:
        self.spec = inner.spec
        self._inner, self._longest = inner, longest

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        if any(len(window.codes) > self._longest for window in windows):
            raise RuntimeError("out of memory")
        return self._inner.decode(windows)


def test_a_decoder_failure_ends_one_stream(own_client: Callable[..., LocalEngineClient]) -> None:
    client = own_client(wrap_decoder=lambda decoder: BreakingDecoder(decoder, longest=20))

    async def scenario() -> None:
        long = StreamingOptions((4, 30), buffer=8)
        bad = speech("bad", exactly=400, streaming=long)
        good = [speech(f"good-{n}", exactly=60) for n in range(3)]
        failed, *fine = await asyncio.gather(*(listen(client, job) for job in (bad, *good)))
        assert len(failed[0].samples) == 4 * HOP
        assert failed[-1].finish_reason is FinishReason.ERROR
        assert "out of memory" in failed[-1].error
        assert [len(samples(blocks)) for blocks in fine] == [60 * HOP] * 3
        await wait_until_idle(client)

    run(scenario)


class HangingDecoder(AudioDecoder):
    """A real decoder whose calls return only after `released` is set."""

    def __init__(self, inner: AudioDecoder) -> None:
        self.spec = inner.spec
        self._inner = inner
        self.released = threading.Event()
        self.hangs = False

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        self.hangs = True
        is_released = self.released.wait(60)
        self.hangs = False
        assert is_released
        return self._inner.decode(windows)


def test_an_engine_whose_step_does_not_return_is_not_alive(
    own_client: Callable[..., LocalEngineClient], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine is alive again after the step returns."""
    made: list[HangingDecoder] = []

    def wrap(decoder: AudioDecoder) -> AudioDecoder:
        made.append(HangingDecoder(decoder))
        return made[0]

    client = own_client(wrap_decoder=wrap, limits=StreamLimits(step_timeout_s=0.5))

    async def is_alive(expected: bool) -> None:
        while (await client.status()).is_alive is not expected:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        await is_alive(True)
        stream = asyncio.create_task(listen(client, speech("a", exactly=8)))
        await is_alive(False)
        await is_alive(False)
        await client.close()  # does not wait for the hanging step
        made[0].released.set()
        assert len(samples(await stream)) == 8 * HOP
        await is_alive(True)

    run(scenario)
    assert caplog.text.count("(step_timeout_s=0.5): the engine hangs") == 1


def test_closing_does_not_wait_for_a_step_that_begins_to_hang(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    """It began shortly before: the engine still counts as alive."""
    made: list[HangingDecoder] = []

    def wrap(decoder: AudioDecoder) -> AudioDecoder:
        made.append(HangingDecoder(decoder))
        return made[0]

    client = own_client(wrap_decoder=wrap, limits=StreamLimits(step_timeout_s=1.0))

    async def scenario() -> None:
        stream = asyncio.create_task(listen(client, speech("a", exactly=8)))
        while not made[0].hangs:
            await asyncio.sleep(0.01)
        await client.close()
        assert made[0].hangs
        made[0].released.set()
        await stream

    run(scenario)


def test_closing_with_time_to_drain_finishes_streams(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    client = own_client()

    async def scenario() -> None:
        job = speech("drained", exactly=150)
        stream = client.speak(job)
        first = await anext(stream)
        closing = asyncio.create_task(client.close(drain_s=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError):
            await listen(client, speech("late"))
        rest = [block async for block in stream]
        assert len(samples([first, *rest])) == 150 * HOP
        assert rest[-1].finish_reason is FinishReason.LENGTH
        await closing

    run(scenario)


def test_closing_at_once_cancels_streams_and_stops_the_thread(
    own_client: Callable[..., LocalEngineClient],
) -> None:
    before = threading.active_count()
    client = own_client()

    async def scenario() -> None:
        streams = [client.speak(speech(f"cut-{n}", exactly=900)) for n in range(3)]
        for stream in streams:
            await anext(stream)
        await client.close()
        for stream in streams:
            blocks = [block async for block in stream]
            assert blocks[-1].finish_reason is FinishReason.CANCELLED
        with pytest.raises(EngineStoppedError):
            await listen(client, speech("late"))
        await client.close()  # again: nothing

    run(scenario)
    assert threading.active_count() <= before
