"""How many messages are received at once: what bounds the memory of messages under way.

gRPC's core keeps the beginning of a message until the rest is there, however slowly it comes. It
lets a client send more than HTTP/2's first window, 64 KiB, once the message is asked for; so that
is done in one of few places:

    place ─▶ one is free ─▶ receive ─▶ leave: it goes to the waiting client that has fewest,
                 │                       of several to the one whose last turn is longest ago
                 │ no, and none gets free for a while
                 ▼
             the message of the client that has most places is given up, if it is late
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tts.errors import IdleTimeoutError

PATIENCE_S = 1.0  # a message that takes no longer is never given up
OWN_PATIENCE_S = 5.0  # nor one that takes no longer, for a client that has as many places


@dataclass(eq=False, slots=True)
class _Place:
    client: str
    limit: asyncio.Timeout
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    since_s: float = 0.0


class Intake:
    """Hands out places, so that no client keeps the others out. One event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._waiting: list[_Place] = []
        self._taken: list[_Place] = []  # the one taken first is first
        self._turns: dict[str, float] = {}  # when clients that are here got their last place

    def __repr__(self) -> str:
        return f"Intake(taken={len(self._taken)}, waiting={len(self._waiting)})"

    @asynccontextmanager
    async def place(self, client: str, timeout_s: float) -> AsyncIterator[None]:
        """Hold a place while the body receives a message; waits for one.

        Raises IdleTimeoutError when both together take longer than the timeout, or when others
        wait for the place.
        """
        try:
            async with asyncio.timeout(timeout_s) as limit:
                place = _Place(client, limit)
                try:
                    await self._take(place)
                    yield
                finally:
                    self._leave(place)
        except TimeoutError:
            raise IdleTimeoutError(
                f"the message was not there within {timeout_s:g} s, or took too long while "
                "others waited; send it at once"
            ) from None

    def check_integrity(self) -> None:
        """Raise AssertionError when places are lost, or one is free while a message waits."""
        assert self._num_free >= 0, self
        assert not (self._num_free and self._waiting), self
        clients = {place.client for place in (*self._waiting, *self._taken)}
        assert self._turns.keys() <= clients, self

    async def _take(self, place: _Place) -> None:
        self._waiting.append(place)
        self._hand_out()
        while not place.taken.is_set():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await place.taken.wait()
            except TimeoutError:
                self._give_up_for(place)

    def _leave(self, place: _Place) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
        elif place in self._taken:
            self._taken.remove(place)
            self._num_free += 1
            self._hand_out()
        if all(place.client != other.client for other in (*self._waiting, *self._taken)):
            self._turns.pop(place.client, None)

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            held = self._held()
            turns = self._turns
            place = min(self._waiting, key=lambda p: (held[p.client], turns.get(p.client, 0.0)))
            self._waiting.remove(place)
            self._taken.append(place)
            self._num_free -= 1
            place.since_s = turns[place.client] = time.monotonic()
            place.taken.set()

    def _give_up_for(self, waiting: _Place) -> None:
        """End the receiving of a message that is late, so that another can be received."""
        held, now_s = self._held(), time.monotonic()
        own = held[waiting.client]

        def is_late(place: _Place) -> bool:
            patience_s = PATIENCE_S if held[place.client] > own else OWN_PATIENCE_S
            return now_s - place.since_s > patience_s and not place.limit.expired()

        late = [place for place in self._taken if is_late(place)]
        if late:
            greediest = max(late, key=lambda place: held[place.client])
            greediest.limit.reschedule(asyncio.get_running_loop().time())

    def _held(self) -> Counter[str]:
        return Counter(place.client for place in self._taken)
