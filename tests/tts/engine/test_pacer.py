"""The pacer: when the decoder gets its next batch while the language model runs."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from llm import FinishReason
from tests.tts.engine.audio_bench import Bench, in_loop, read, tokens
from tts.engine.pacer import (
    BURST_S,
    FADING,
    FIRST_REST,
    MARGIN_S,
    MAX_NEAR_S,
    MAX_SLOW_NEAR_S,
    NEAR_S,
    REST,
    SLOW_REST,
    URGENT_REST,
    WAY_S,
    DeadlinePacer,
    DecodePacer,
)

AHEAD_S = DeadlinePacer.ahead_s
PACERS = pytest.mark.parametrize("kind", [DecodePacer, DeadlinePacer])


Waiting = dict[str, Any]
CALM: Waiting = {}
FIRST: Waiting = {"awaits_first_audio": True}
FULL: Waiting = {"fills_batch": True}
ALL: Waiting = {"has_all_streams": True}
TOOK_S = 0.004


def near(underrun_s: float) -> Waiting:
    return {"underrun_s": underrun_s}


@PACERS
@pytest.mark.parametrize(("waiting", "rest"), [(CALM, REST), (ALL, 0.0)])
def test_a_decoder_rests_after_a_call(
    kind: type[DecodePacer], waiting: Waiting, rest: float
) -> None:
    pacer, rest_s = kind(), TOOK_S * rest
    assert pacer.is_due(0.0, **waiting, num_in_flight=0)  # no call was made before
    pacer.note(10.0, TOOK_S)
    ended_s = 10.0 + TOOK_S
    assert pacer.is_due(ended_s + rest_s + 1e-6, **waiting, num_in_flight=0)
    assert not pacer.is_due(ended_s + rest_s - 1e-6, **waiting, num_in_flight=int(rest_s == 0))
    assert not pacer.is_due(ended_s + rest_s + 1e-6, **waiting, num_in_flight=1)


@PACERS
def test_calls_for_first_blocks_take_their_share_of_the_time_in_the_mean(
    kind: type[DecodePacer],
) -> None:
    """At first without rest; then with the whole rest, until the decoder has rested more."""
    pacer, now_s, gaps_s, ended_s = kind(), 10.0, list[float](), 10.0
    while now_s < 12.0:
        if not pacer.is_due(now_s, **FIRST, num_in_flight=0):
            now_s += 1e-5
            continue
        gaps_s.append(now_s - ended_s)
        pacer.note(now_s, TOOK_S)
        now_s = ended_s = now_s + TOOK_S
    rest_s = pacer.first_rest * TOOK_S
    num_quick = math.floor(BURST_S / rest_s) + 1
    assert max(gaps_s[:num_quick]) == 0.0
    assert gaps_s[num_quick + 1 :] == pytest.approx(
        [rest_s] * (len(gaps_s) - num_quick - 1), abs=1e-4
    )
    assert pacer.is_due(now_s + rest_s + 1e-4, **FIRST, num_in_flight=0)
    assert not pacer.is_due(now_s + rest_s + 1e-4, **FIRST, num_in_flight=1)
    pacer.note(20.0, TOOK_S)
    assert pacer.is_due(20.0 + TOOK_S, **FIRST, num_in_flight=0)


@PACERS
def test_a_slow_model_has_rest_after_each_call(kind: type[DecodePacer]) -> None:
    """At twice real time, 20 tokens a second: earlier rest does not count."""

    async def scenario() -> None:
        pacer, stream = kind(), Bench().speak()
        pacer.hold_s(stream)
        assert not pacer.is_slow  # its speed is not known yet
        for turn in range(200):
            pacer.note_turn(turn * 0.5 / stream.token_rate, 1)
        assert pacer.is_slow
        pacer.note(200.0, TOOK_S)
        rest_s = TOOK_S * (SLOW_REST if kind is DeadlinePacer else FIRST_REST)
        assert not pacer.is_due(200.0 + TOOK_S + rest_s - 1e-6, **FIRST)
        assert pacer.is_due(200.0 + TOOK_S + rest_s + 1e-6, **FIRST)
        for turn in range(200):
            pacer.note_turn(100.0 + turn * 0.3 / stream.token_rate, 1)
        assert not pacer.is_slow

    in_loop(scenario)


def test_streams_near_an_underrun_gather_where_the_model_is_slow() -> None:
    """A call that is not full comes after rest, and not behind another one: urgency is earlier."""

    async def scenario() -> None:
        pacer, stream = DeadlinePacer(), Bench().speak()
        pacer.hold_s(stream)
        pacer.note(9.0, TOOK_S)
        assert pacer.is_due(9.0 + TOOK_S, **near(9.0), num_in_flight=1)
        for turn in range(200):
            pacer.note_turn(turn * 0.5 / stream.token_rate, 1)
        pacer.note(10.0, TOOK_S)
        ended_s, rest_s = 10.0 + TOOK_S, URGENT_REST * TOOK_S
        rested_s = ended_s + rest_s + 1e-6
        soon = near(rested_s + WAY_S + 2.5 * TOOK_S)
        assert not pacer.is_due(ended_s + rest_s - 1e-6, **soon)
        assert pacer.is_due(rested_s, **soon)
        assert not pacer.is_due(rested_s, **soon, num_in_flight=1)
        assert pacer.is_due(rested_s, **near(rested_s + 2 * TOOK_S), num_in_flight=1)  # else late
        assert pacer.is_due(ended_s, **near(ended_s))
        assert pacer.is_due(ended_s, **soon, **FULL, num_in_flight=1)
        step_s = 0.5 / stream.token_rate
        assert pacer.near_s(0) == pytest.approx(
            min(MAX_SLOW_NEAR_S, WAY_S + 2 * step_s + (1 + URGENT_REST) * TOOK_S)
        )

    in_loop(scenario)


@PACERS
@pytest.mark.parametrize("waiting", [FULL, near(10.0), near(10.0 + MARGIN_S + 2 * TOOK_S - 1e-6)])
def test_urgent_streams_do_not_wait(kind: type[DecodePacer], waiting: Waiting) -> None:
    pacer = kind()
    pacer.note(10.0 - TOOK_S, TOOK_S)
    assert pacer.is_due(10.0, **waiting, num_in_flight=1)


@PACERS
def test_a_stream_with_enough_audio_is_not_urgent(kind: type[DecodePacer]) -> None:
    pacer = kind()
    pacer.note(10.0 - TOOK_S, TOOK_S)
    near_s = NEAR_S if kind is DecodePacer else MARGIN_S + TOOK_S
    assert not pacer.is_due(10.0, **near(10.0 + near_s + 1e-6), num_in_flight=0)


def test_an_underrun_is_near_while_a_call_behind_those_in_flight_would_end_late() -> None:
    pacer = DeadlinePacer()
    assert pacer.near_s(0) == MARGIN_S  # no call yet
    pacer.note(10.0, 0.01)
    pacer.note(10.1, 0.002)
    long_s = FADING * 0.01  # the longer one is remembered
    assert [pacer.near_s(n) for n in (0, 1)] == [MARGIN_S + long_s, MARGIN_S + 2 * long_s]
    for turn in range(200):
        pacer.note_turn(11 + 0.01 * turn, 1)  # and a turn of the engine is known
    assert pacer.near_s(0) == pytest.approx(WAY_S + 0.02 + long_s, abs=1e-6)
    pacer.note(13.2, 0.5)
    assert pacer.near_s(0) == MAX_NEAR_S


class FixedPacer(DeadlinePacer):
    """A pacer that counts each call as 50 ms long."""

    def note(self, started_s: float, took_s: float) -> None:
        super().note(started_s, 0.05)


def test_windows_are_collected_while_the_decoder_rests() -> None:
    """Blocks of all sizes share the call that comes after the rest."""

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer())
        tasks = [bench.speak(str(n), sizes=(25, n)) for n in (2, 3, 4, 5)]
        for task in tasks:
            tokens(task, *range(25))
        bench.turns()
        assert bench.decoder.batches == [
            4
        ]  # all streams are ready, and all wait for their first block
        for task in tasks:
            await read(task)
            assert task.plays_until_s == bench.clock.now_s + 1.0
        for task, count in zip(tasks[:3], (2, 3, 4), strict=True):
            tokens(task, *range(count))
            assert bench.worker.after_step()
        bench.clock.now_s += 0.05 + REST * 0.05 - 0.001
        assert bench.worker.after_step()
        assert bench.decoder.batches == [4]
        bench.clock.now_s += 0.002
        assert not bench.worker.after_step()
        assert bench.decoder.batches == [4, 3]
        assert [len(task.queue) for task in tasks] == [1, 1, 1, 0]

    in_loop(scenario)


def test_a_stream_near_underrun_is_decoded_at_once() -> None:
    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer())
        poor, rich = bench.speak("poor", sizes=(2, 3)), bench.speak("rich", sizes=(25, 4))
        idle = bench.speak("idle")
        tokens(poor, 1, 2)  # 80 ms
        tokens(rich, *range(25))
        tokens(idle, 1)
        bench.clock.now_s += 10
        bench.worker.after_step()
        assert bench.decoder.batches == [2]
        tokens(rich, *range(4))
        assert bench.worker.after_step()
        bench.clock.now_s += 0.03
        tokens(poor, 1, 2, 3)
        assert not bench.worker.after_step()
        assert bench.decoder.batches == [2, 2]  # the other one is taken along

    in_loop(scenario)


def test_a_lone_stream_never_waits() -> None:
    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer())
        task = bench.speak(sizes=(25, 5))
        for count in (25, 5, 5, 5):
            tokens(task, *range(count))
            assert not bench.worker.after_step()
        assert bench.decoder.batches == [1, 1, 1, 1]
        tokens(task, 7, end=FinishReason.STOP)
        bench.worker.after_step()
        assert len(await read(task)) == 5

    in_loop(scenario)


def test_a_full_batch_is_decoded_at_once() -> None:
    async def scenario() -> None:
        pacer = FixedPacer()
        bench = Bench(pads=True, pacer=pacer)
        tasks = [bench.speak(str(n), sizes=(20,)) for n in range(10)]
        for task in tasks[:9]:
            tokens(task, *range(20))
        bench.clock.now_s += 10
        for _ in range(3):
            pacer.note(bench.clock.now_s - 0.05, 0.05)  # the decoder has not rested
        bench.worker.after_step()
        assert bench.decoder.batches == [8]
        assert bench.worker.after_step()  # the ninth waits for its first block, until it has
        for task in tasks[:7]:
            tokens(task, *range(20))
        bench.worker.after_step()
        assert bench.decoder.batches == [8, 8]
        assert len(tasks[8].queue) == 1

    in_loop(scenario)


def test_windows_that_are_played_late_do_not_fill_a_batch() -> None:
    """Eight streams with more than `AHEAD_S` of audio wait until the decoder has rested."""

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer())
        tasks = [bench.speak(str(n), sizes=(30, 25)) for n in range(8)]
        bench.speak("idle")
        for task in tasks:
            tokens(task, *range(30))  # 1.2 s
        bench.worker.after_step()
        assert bench.decoder.batches == [8]
        for task in tasks:
            tokens(task, *range(25))
        assert bench.worker.after_step()
        assert bench.decoder.batches == [8]
        bench.clock.now_s += 1.2 - AHEAD_S + 0.001
        assert not bench.worker.after_step()
        assert bench.decoder.batches == [8, 8]

    in_loop(scenario)


def test_a_window_is_as_urgent_as_its_stream_with_those_before_it() -> None:
    """Streams that are far ahead take turns in a call that has no room for all of their windows."""

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer())
        far, near_end = bench.speak("far", sizes=(10,)), bench.speak("near", sizes=(4,))
        tokens(far, *range(10))
        tokens(near_end, *range(4))
        bench.worker.after_step()
        assert bench.decoder.batches == [2]
        tokens(far, *range(60))  # six windows of 0.4 s, after 0.4 s
        tokens(near_end, *range(60))  # fifteen of 0.16 s, after 0.16 s
        bench.worker.after_step()
        assert bench.decoder.batches == [2, 8]
        assert (len(far.queue), len(near_end.queue)) == (1 + 2, 1 + 6)

    in_loop(scenario)


def test_urgent_windows_of_other_shapes_share_a_launch() -> None:
    """The codec renders windows of one shape at a time; what is not urgent waits for its own."""

    async def scenario() -> None:
        bench = Bench(pacer=FixedPacer())
        first, other, late = (
            bench.speak("a", (2,)),
            bench.speak("b", (3,)),
            bench.speak("c", (50, 4)),
        )
        tokens(late, *range(50))  # 2 s
        bench.worker.after_step()
        assert bench.decoder.batches == [1]
        bench.clock.now_s += 1
        for task, count in ((first, 2), (other, 3), (late, 4)):
            tokens(task, *range(count))
        bench.worker.after_step()
        assert bench.decoder.batches == [1, 1, 1]
        assert [len(task.queue) for task in (first, other, late)] == [1, 1, 1]

    in_loop(scenario)


def test_a_codec_with_states_gets_one_window_of_each_stream() -> None:
    async def scenario() -> None:
        bench = Bench(pads=True, pacer=FixedPacer(), keeps_state=True)
        tasks = [bench.speak(str(n), sizes=(5,)) for n in range(3)]
        for task in tasks:
            tokens(task, *range(10))
        assert bench.worker.after_step()
        assert bench.decoder.batches == [3]
        bench.worker.after_step()
        assert bench.decoder.batches == [3, 3]
        assert [len(task.queue) for task in tasks] == [2, 2, 2]

    in_loop(scenario)


def test_a_turn_reviews_only_changed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among a hundred streams with a new token, only the one with a block is reviewed again."""
    seen: list[str] = []

    async def scenario() -> None:
        bench = Bench(pads=True)
        tasks = [bench.speak(str(n), sizes=(3,)) for n in range(100)]
        for task in tasks:
            tokens(task, 1)
        bench.turns()
        review = bench.worker._review
        monkeypatch.setattr(
            bench.worker, "_review", lambda task: (seen.append(task.request_id), review(task))
        )
        for _ in range(3):
            tokens(tasks[7], 2)
            bench.worker.after_step()
        assert (seen, len(tasks[7].queue)) == (["7", "7"], 1)  # its tokens, its block

    in_loop(scenario)


def test_the_pace_records_the_duration_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace gets the start and the duration of each decoder call."""
    noted: list[tuple[float, float]] = []
    monkeypatch.setattr(DecodePacer, "note", lambda self, *call: noted.append(call))

    async def scenario() -> None:
        bench = Bench(pads=True, pacer=DecodePacer())
        tokens(bench.speak(sizes=(2,)), 1, 2)
        began_s = time.perf_counter()
        bench.turns()
        turns_s = time.perf_counter() - began_s
        ((started_s, took_s),) = noted
        assert started_s == bench.clock.now_s
        assert 0 < took_s <= turns_s

    in_loop(scenario)
