"""Places for messages that are being received: limited, shared fairly, revoked when others wait."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from tests.tts.serving import run
from tts.errors import IdleTimeoutError
from tts.server import access
from tts.server.access import ReceiveSlots

LONG_S = 50.0
PATIENCE_S, OWN_PATIENCE_S = 0.2, 1.0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are late sooner."""
    monkeypatch.setattr(access, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(access, "OWN_PATIENCE_S", OWN_PATIENCE_S)


class Receiving:
    """A message whose arrival the test controls."""

    def __init__(self, slots: ReceiveSlots, client: str, timeout_s: float = LONG_S) -> None:
        self.has_place, self.arrived = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._receive(slots, client, timeout_s))

    async def _receive(self, slots: ReceiveSlots, client: str, timeout_s: float) -> None:
        async with slots.slot(client, timeout_s):
            self.has_place.set()
            await self.arrived.wait()

    async def end(self) -> None:
        self.arrived.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_place_goes_to_the_client_with_the_fewest() -> None:
    async def scenario() -> None:
        slots = ReceiveSlots(2)
        first, second = (Receiving(slots, "many") for _ in range(2))
        await settle()
        third = Receiving(slots, "many")
        await settle()
        other = Receiving(slots, "other")
        await settle()
        assert first.has_place.is_set()
        assert second.has_place.is_set()
        await first.end()
        await settle()
        assert other.has_place.is_set()
        assert not third.has_place.is_set()
        for receiving in (second, third, other):
            await receiving.end()
        slots.check_integrity()

    run(scenario())


@pytest.mark.usefixtures("impatient")
def test_the_client_with_the_most_places_loses_its_late_message() -> None:
    async def scenario() -> None:
        slots = ReceiveSlots(2)
        slow = [Receiving(slots, "many") for _ in range(2)]
        await asyncio.sleep(PATIENCE_S)
        other = Receiving(slots, "other")
        await other.has_place.wait()
        with pytest.raises(IdleTimeoutError, match="while others waited"):
            await slow[0].task
        assert not slow[1].task.done()
        for receiving in (slow[1], other):
            await receiving.end()
        slots.check_integrity()

    run(scenario())


@pytest.mark.usefixtures("impatient")
def test_many_endless_messages_do_not_block_another_client() -> None:
    async def scenario() -> None:
        slots = ReceiveSlots(2)
        slow = [Receiving(slots, f"slow-{number % 8}") for number in range(80)]
        await asyncio.sleep(PATIENCE_S)
        other = Receiving(slots, "other")
        await other.has_place.wait()
        assert sum(receiving.has_place.is_set() for receiving in slow) <= 8, "a turn for each"
        for receiving in slow:
            receiving.task.cancel()
        await asyncio.wait([receiving.task for receiving in slow])
        await other.end()
        slots.check_integrity()

    run(scenario())


@pytest.mark.usefixtures("impatient")
def test_messages_of_the_same_client_get_more_time() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        slots = ReceiveSlots(1)
        began = loop.time()
        slow = Receiving(slots, "one")
        await settle()
        other = Receiving(slots, "one")
        with pytest.raises(IdleTimeoutError):
            await slow.task
        assert loop.time() - began >= OWN_PATIENCE_S
        await other.end()

    run(scenario())


def test_waiting_counts_as_time() -> None:
    async def scenario() -> None:
        slots = ReceiveSlots(1)
        slow = Receiving(slots, "one")
        await settle()
        with pytest.raises(IdleTimeoutError, match=r"within 0\.1 s"):
            await Receiving(slots, "two", 0.1).task
        await slow.end()
        slots.check_integrity()

    run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_no_place_is_lost(seed: int) -> None:
    """Clients arrive, wait, are cancelled and time out; at the end every place is free."""

    async def scenario() -> None:
        draw = random.Random(seed)
        slots = ReceiveSlots(3)
        open_now: list[Receiving] = []
        for _ in range(300):
            open_now.append(Receiving(slots, draw.choice("abcd"), draw.choice((0.001, 0.05))))
            if draw.random() < 0.3:
                await asyncio.sleep(draw.choice((0, 0.002)))
            chosen = draw.choice(open_now)
            draw.choice((chosen.arrived.set, chosen.task.cancel))()
            slots.check_integrity()
        for receiving in open_now:
            receiving.arrived.set()
            with suppress(IdleTimeoutError, asyncio.CancelledError):
                await receiving.task
        slots.check_integrity()
        last = [Receiving(slots, "e") for _ in range(3)]
        await settle()
        assert all(receiving.has_place.is_set() for receiving in last)
        for receiving in last:
            await receiving.end()

    run(scenario())
