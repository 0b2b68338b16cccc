"""When a decoder beside the language model gets its next batch: the rule, and the worker."""

from __future__ import annotations

import math
import time

import pytest

from llm import FinishReason
from tests.tts.audio_bench import Bench, in_loop, read, tokens
from tts.pace import FIRST_REST, NEAR_S, REST, Pace, Waiting

CALM = Waiting(dry_s=math.inf, has_unheard=False, fills_batch=False, is_everyone=False)
FIRST = Waiting(dry_s=math.inf, has_unheard=True, fills_batch=False, is_everyone=False)
FULL = Waiting(dry_s=math.inf, has_unheard=False, fills_batch=True, is_everyone=False)
ALL = Waiting(dry_s=math.inf, has_unheard=False, fills_batch=False, is_everyone=True)
TOOK_S = 0.004


def near(dry_s: float) -> Waiting:
    return Waiting(dry_s=dry_s, has_unheard=False, fills_batch=False, is_everyone=False)


@pytest.mark.parametrize(
    ("waiting", "rest_s"), [(CALM, REST * TOOK_S), (FIRST, FIRST_REST * TOOK_S), (ALL, 0.0)]
)
def test_a_decoder_rests_after_a_call(waiting: Waiting, rest_s: float) -> None:
    pace = Pace()
    assert pace.is_due(0.0, waiting, is_busy=False)  # nothing was ever rendered
    pace.note(10.0, TOOK_S)
    ended_s = 10.0 + TOOK_S
    assert pace.is_due(ended_s + rest_s + 1e-6, waiting, is_busy=False)
    assert not pace.is_due(ended_s + rest_s - 1e-6, waiting, is_busy=rest_s == 0)
    assert not pace.is_due(ended_s + rest_s + 1e-6, waiting, is_busy=True)


@pytest.mark.parametrize("waiting", [FULL, near(10.0), near(10.0 + NEAR_S - 1e-6)])
def test_what_is_urgent_waits_for_nothing(waiting: Waiting) -> None:
    pace = Pace()
    pace.note(10.0 - TOOK_S, TOOK_S)
    assert pace.is_due(10.0, waiting, is_busy=True)


def test_who_has_audio_enough_is_not_urgent() -> None:
    pace = Pace()
    pace.note(10.0 - TOOK_S, TOOK_S)
    assert not pace.is_due(10.0, near(10.0 + NEAR_S + 1e-6), is_busy=False)


class Slow(Pace):
    """As after calls of 50 ms, whatever they took."""

    def note(self, started_s: float, took_s: float) -> None:
        super().note(started_s, 0.05)


def test_windows_gather_while_the_decoder_rests() -> None:
    """Blocks of all sizes share the call that comes after the rest."""

    async def scenario() -> None:
        bench = Bench(pads=True, pace=Slow())
        tasks = [bench.speak(str(n), sizes=(25, n)) for n in (2, 3, 4, 5)]
        for task in tasks:
            tokens(task, *range(25))
        bench.turns()
        assert bench.decoder.batches == [4]  # everyone is there, and nobody has heard anything
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


def test_a_listener_near_silence_is_served_at_once() -> None:
    async def scenario() -> None:
        bench = Bench(pads=True, pace=Slow())
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
        bench = Bench(pads=True, pace=Slow())
        task = bench.speak(sizes=(25, 5))
        for count in (25, 5, 5, 5):
            tokens(task, *range(count))
            assert not bench.worker.after_step()
        assert bench.decoder.batches == [1, 1, 1, 1]
        tokens(task, 7, end=FinishReason.STOP)
        bench.worker.after_step()
        assert len(await read(task)) == 5

    in_loop(scenario)


def test_a_full_batch_goes_at_once() -> None:
    async def scenario() -> None:
        bench = Bench(pads=True, pace=Slow())
        tasks = [bench.speak(str(n), sizes=(25,)) for n in range(10)]
        for task in tasks[:9]:
            tokens(task, *range(25))
        bench.clock.now_s += 10
        bench.worker.after_step()
        assert bench.decoder.batches == [8]
        assert bench.worker.after_step()  # the ninth has heard nothing, and the decoder rests
        for task in tasks[:7]:
            tokens(task, *range(25))
        bench.worker.after_step()
        assert bench.decoder.batches == [8, 8]
        assert len(tasks[8].queue) == 1

    in_loop(scenario)


def test_a_turn_looks_only_at_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred streams that get a token each, at the one that has a block."""
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


def test_rendering_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pace is told when a call began and how long the decoder was at it."""
    noted: list[tuple[float, float]] = []
    monkeypatch.setattr(Pace, "note", lambda self, *call: noted.append(call))

    async def scenario() -> None:
        bench = Bench(pads=True, pace=Pace())
        tokens(bench.speak(sizes=(2,)), 1, 2)
        began_s = time.perf_counter()
        bench.turns()
        turns_s = time.perf_counter() - began_s
        ((started_s, took_s),) = noted
        assert started_s == bench.clock.now_s
        assert 0 < took_s <= turns_s

    in_loop(scenario)
