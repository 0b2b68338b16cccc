"""Admission: a bounded and fair queue whose counts stay exact under cancellation."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import FrozenInstanceError

import pytest

from tests.tts.engine.jobs import in_slot
from tests.tts.serving import run
from tts.engine.admission import Admission, AdmissionLimits
from tts.errors import ServerBusyError, StreamLimitError


class Callers:
    """Calls that hold a place until the test ends them."""

    def __init__(self, running: int, waiting: int, per_client: int = 1000) -> None:
        self.changes: list[tuple[int, int]] = []
        limits = AdmissionLimits(running, waiting, per_client)
        self.admission = Admission(limits, lambda *change: self.changes.append(change))
        self.entered: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def arrive(self, name: str, client: str = "client") -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._call(name, client))
        await asyncio.sleep(0)
        self.admission.check_integrity()

    async def _call(self, name: str, client: str) -> None:
        async with in_slot(self.admission, client):
            self.entered.append(name)
            await self._leave[name].wait()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)

    def cancel(self, name: str) -> None:
        self._tasks[name].cancel()

    async def cancel_and_wait(self, name: str) -> None:
        self.cancel(name)
        await asyncio.wait((self._tasks[name],))

    async def result(self, name: str) -> None:
        await self._tasks[name]


def test_first_come_first_served() -> None:
    async def scenario() -> None:
        callers = Callers(running=2, waiting=3)
        for name in "abcde":
            await callers.arrive(name)
        assert callers.entered == ["a", "b"]
        assert (callers.admission.running, callers.admission.waiting) == (2, 3)
        await callers.leave("b")
        await callers.leave("a")
        assert callers.entered == ["a", "b", "c", "d"]
        await callers.leave("c")
        await callers.leave("d")
        await callers.leave("e")
        assert (callers.admission.running, callers.admission.waiting) == (0, 0)

    run(scenario())


def test_a_full_queue_refuses_calls_with_a_retry_delay() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=1)
        for name in "abc":
            await callers.arrive(name)
        with pytest.raises(ServerBusyError) as caught:
            await callers.result("c")
        assert 0.1 <= caught.value.retry_after_s <= 60
        callers.admission.check_integrity()
        await callers.leave("a")
        await callers.leave("b")
        await callers.arrive("d")
        assert callers.entered == ["a", "b", "d"]
        await callers.leave("d")

    run(scenario())


def test_the_queue_has_a_maximum_length() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=300)
        names = [str(number) for number in range(301)]
        for name in names:
            await callers.arrive(name)
        await callers.arrive("late")
        with pytest.raises(ServerBusyError):
            await callers.result("late")
        for name in names:
            await callers.leave(name)
        assert callers.entered == names

    run(scenario())


def test_one_client_cannot_take_all_places() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=10, per_client=2)
        await callers.arrive("a", "greedy")
        await callers.arrive("b", "greedy")
        await callers.arrive("c", "greedy")
        with pytest.raises(StreamLimitError) as caught:
            await callers.result("c")
        assert caught.value.retry_after_s == 1.0  # how long a call is thought to take at first
        await callers.arrive("d", "modest")
        assert callers.admission.waiting == 2
        await callers.leave("a")
        await callers.arrive("e", "greedy")
        for name in "bde":
            await callers.leave(name)
        assert callers.entered == ["a", "b", "d", "e"]

    run(scenario())


def test_cancelled_calls_leave_the_queue() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=2)
        for name in "abc":
            await callers.arrive(name)
        await callers.cancel_and_wait("b")
        assert callers.admission.waiting == 1
        await callers.leave("a")
        assert callers.entered == ["a", "c"]
        await callers.leave("c")

    run(scenario())


def test_a_wait_for_a_place_may_be_given_up_and_begun_again() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(max_running=1, max_waiting=1, max_per_client=2))
        async with admission.request("a") as slot:
            async with in_slot(admission, "b"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(slot.held(), 0.01)
                assert (slot.is_held, admission.waiting) == (False, 0)
            await slot.held()
            await slot.held()  # again: nothing
            assert (slot.is_held, admission.running) == (True, 1)
        assert (admission.running, admission.waiting) == (0, 0)

    run(scenario())


def test_a_place_given_to_a_cancelled_call_is_passed_on() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=2)

        async def leave_and_cancel(name: str) -> None:
            async with in_slot(callers.admission, "client"):
                await asyncio.sleep(0.01)
            callers.cancel(name)  # in the same step as the hand-over

        leaving = asyncio.create_task(leave_and_cancel("b"))
        await asyncio.sleep(0)
        await callers.arrive("b")
        await callers.arrive("c")
        await leaving
        await asyncio.sleep(0)
        assert callers.entered == ["c"]
        await callers.leave("c")
        callers.admission.check_integrity()
        assert callers.admission.running == 0

    run(scenario())


def test_estimates_follow_how_long_calls_take() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(1, 1, 10))
        before = admission.retry_after_s
        for _ in range(20):
            async with in_slot(admission, "client"):
                pass
        assert admission.retry_after_s < before

    run(scenario())


def test_an_estimate_counts_the_turns_until_there_is_a_place() -> None:
    async def scenario() -> None:
        callers, estimates = Callers(running=2, waiting=4), []
        for name in "abcdef":
            await callers.arrive(name)
            estimates.append(callers.admission.retry_after_s)
        assert estimates == [0.5, 0.5, 1.0, 1.5, 2.0, 2.5]
        for name in "abcdef":
            await callers.leave(name)

    run(scenario())


@pytest.mark.parametrize(("running", "waiting", "expected"), [(100, 0, 0.1), (1, 70, 60.0)])
def test_an_estimate_is_within_limits(running: int, waiting: int, expected: float) -> None:
    async def scenario() -> None:
        callers = Callers(running, waiting)
        names = [str(number) for number in range(running + waiting)]
        for name in names:
            await callers.arrive(name)
        assert callers.admission.retry_after_s == expected
        for name in names:
            await callers.leave(name)

    run(scenario())


def test_the_newest_call_counts_for_a_tenth() -> None:
    async def scenario() -> None:
        admission = Admission(AdmissionLimits(1, 1, 10))
        before = time.monotonic()
        async with in_slot(admission, "client"):
            entered = time.monotonic()
            await asyncio.sleep(0.01)
            least = time.monotonic() - entered
        most = time.monotonic() - before
        assert 0.9 + 0.1 * least <= admission.retry_after_s <= 0.9 + 0.1 * most

    run(scenario())


def test_every_change_is_reported() -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=2)
        for name in "abc":
            await callers.arrive(name)
        await callers.cancel_and_wait("b")
        await callers.leave("a")
        await callers.leave("c")
        assert callers.changes == [(1, 0), (1, 1), (1, 2), (1, 1), (1, 0), (0, 0)]

    run(scenario())


def test_limits_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        AdmissionLimits(1, 1, 1).max_running = 2  # type: ignore[misc]


@pytest.mark.parametrize("running", [-1, 0, 2])
def test_check_integrity_finds_a_wrong_count(running: int) -> None:
    async def scenario() -> None:
        callers = Callers(running=1, waiting=2)
        for name in "ab":
            await callers.arrive(name)
        callers.admission.running = running
        with pytest.raises(AssertionError, match=f"running={running}, waiting=1"):
            callers.admission.check_integrity()
        callers.admission.running = 1
        for name in "ab":
            await callers.leave(name)

    run(scenario())


def test_check_integrity_finds_a_negative_count() -> None:
    admission = Admission(AdmissionLimits(1, 2, 3))
    admission.check_integrity()
    admission.running = -1
    with pytest.raises(AssertionError, match="running=-1, waiting=0"):
        admission.check_integrity()


def test_check_integrity_finds_calls_without_a_client() -> None:
    async def scenario() -> None:
        callers = Callers(running=2, waiting=2)
        for name in "ab":
            await callers.arrive(name)
        callers.admission._per_client["client"] -= 1
        with pytest.raises(AssertionError, match="running=2, waiting=0"):
            callers.admission.check_integrity()
        callers.admission._per_client["client"] += 1
        for name in "ab":
            await callers.leave(name)

    run(scenario())


def test_no_place_is_lost_under_random_arrivals_and_cancellations() -> None:
    async def call(callers: Callers, draw: random.Random) -> None:
        try:
            async with asyncio.timeout(draw.random() * 0.02):
                async with in_slot(callers.admission, f"client-{draw.randrange(5)}"):
                    await asyncio.sleep(draw.random() * 0.005)
                    callers.admission.check_integrity()
        except (TimeoutError, ServerBusyError, StreamLimitError):
            pass

    async def scenario() -> None:
        draw, callers = random.Random(1), Callers(running=3, waiting=20, per_client=8)
        for _ in range(10):
            await asyncio.gather(*(call(callers, draw) for _ in range(60)))
            callers.admission.check_integrity()
            assert (callers.admission.running, callers.admission.waiting) == (0, 0)
            assert not callers.admission._per_client

    run(scenario())
