"""Who may start now, who waits, who is turned away: the bounded queue in front of the engine.

    enter ──▶ running < max_running ──▶ run ──▶ leave: the longest waiter takes over the place
                    │ no
                    ▼
              waiting < max_waiting ──▶ wait (cancelling leaves the queue at once)
                    │ no
                    ▼
              ServerBusyError with an estimate of when to come back

One event loop owns an `Admission`; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from tts.errors import ServerBusyError, StreamLimitError

SMOOTHING = 0.1  # weight of the newest call in the mean call length
RETRY_RANGE_S = (0.1, 60.0)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many calls run at once, how many wait, and how many one client may have open."""

    max_running: int
    max_waiting: int
    max_per_client: int


class Admission:
    """First come, first served, within the limits.

    `on_change` is told how many run and how many wait, whenever that has changed.
    """

    def __init__(
        self, limits: AdmissionLimits, on_change: Callable[[int, int], None] | None = None
    ) -> None:
        self._limits = limits
        self._on_change = on_change
        self._running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._per_client: Counter[str] = Counter()
        self._mean_call_s = 1.0

    def __repr__(self) -> str:
        return f"Admission(running={self.running}, waiting={self.waiting}, {self._limits})"

    @property
    def running(self) -> int:
        """Calls that hold a place."""
        return self._running

    @property
    def waiting(self) -> int:
        """Calls in the queue."""
        return len(self._waiters)

    @property
    def retry_after_s(self) -> float:
        """Seconds until a place in the queue is likely to be free, from recent call lengths."""
        low, high = RETRY_RANGE_S
        turns = (self.waiting + 1) / self._limits.max_running
        return min(high, max(low, self._mean_call_s * turns))

    @asynccontextmanager
    async def enter(self, client: str) -> AsyncIterator[None]:
        """Hold a place while the body runs; waits for one.

        Raises StreamLimitError or ServerBusyError when there is no room.
        """
        self._check_client(client)
        self._per_client[client] += 1
        try:
            await self._take_place()
            started = time.monotonic()
            try:
                yield
            finally:
                self._mean_call_s += SMOOTHING * (time.monotonic() - started - self._mean_call_s)
                self._hand_over()
        finally:
            self._per_client[client] -= 1
            if not self._per_client[client]:
                del self._per_client[client]

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        assert 0 <= self._running <= self._limits.max_running, self
        assert self.waiting <= self._limits.max_waiting, self
        assert not self.waiting or self._running == self._limits.max_running, self
        # A cancelled waiter leaves the queue a moment before it leaves its client's count.
        assert self._running + self.waiting <= self._per_client.total(), self

    def _check_client(self, client: str) -> None:
        limit = self._limits.max_per_client
        if self._per_client[client] >= limit:
            raise StreamLimitError(
                f"this client has {limit} calls open, which is the limit; close one first",
                subject="client",
                retry_after_s=max(RETRY_RANGE_S[0], self._mean_call_s),
            )

    async def _take_place(self) -> None:
        if self._running < self._limits.max_running:
            self._running += 1
            self._changed()
            return
        if self.waiting >= self._limits.max_waiting:
            raise ServerBusyError(
                f"{self._running} requests run and {self.waiting} wait; try again later",
                subject="server",
                retry_after_s=self.retry_after_s,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(place)
        self._changed()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._hand_over()  # the place came in the same turn as the cancellation
            else:
                with suppress(ValueError):  # a hand-over may have passed over it already
                    self._waiters.remove(place)
                self._changed()
            raise

    def _hand_over(self) -> None:
        while self._waiters:
            place = self._waiters.popleft()
            if not place.done():
                place.set_result(None)
                break
        else:
            self._running -= 1
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.running, self.waiting)
