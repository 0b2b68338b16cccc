"""Bounded queue in front of the engine: decides which calls run, wait, or are refused.

    held ───▶ running < max_running ──▶ run ──▶ leave: the oldest waiting call takes the slot
                    │ no
                    ▼
              waiting < max_waiting ──▶ wait (cancelling leaves the queue at once)
                    │ no
                    ▼
              ServerBusyError with an estimated delay for a retry

One event loop owns an `Admission`; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tts.errors import ServerBusyError, StreamLimitError

if TYPE_CHECKING:
    from tts.engine.client import EngineClient

SMOOTHING = 0.1  # weight of the newest call in the mean call length
RETRY_RANGE_S = (0.1, 60.0)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Maximum numbers of running calls, of waiting calls, and of open calls of one client."""

    max_running: int
    max_waiting: int
    max_per_client: int


def _ignore(num_running: int, num_waiting: int) -> None:
    pass


class Admission:
    """First-come, first-served admission of calls within the limits.

    `on_change` is called with the numbers of running and waiting calls when they have changed.
    """

    def __init__(
        self, limits: AdmissionLimits, on_change: Callable[[int, int], None] = _ignore
    ) -> None:
        self._limits = limits
        self._on_change = on_change
        self.running = 0
        """Number of calls that hold a slot."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._per_client: Counter[str] = Counter()
        self._mean_call_s = 1.0

    def __repr__(self) -> str:
        return f"Admission(running={self.running}, waiting={self.waiting}, {self._limits})"

    @property
    def waiting(self) -> int:
        """Number of calls in the queue."""
        return len(self._waiters)

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until the queue has room, from the lengths of recent calls."""
        low, high = RETRY_RANGE_S
        turns = (self.waiting + 1) / self._limits.max_running
        return min(high, max(low, self._mean_call_s * turns))

    @asynccontextmanager
    async def request(
        self, client: str, on_held: Callable[[], None] = lambda: None
    ) -> AsyncIterator[LocalSlot]:
        """Yield a slot at once, which the body enters: it is queued when it waits for the slot."""
        async with AsyncExitStack() as stack:
            yield LocalSlot(partial(self._hold, client), stack, on_held)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts contradict each other."""
        assert 0 <= self.running <= self._limits.max_running, self
        assert self.waiting <= self._limits.max_waiting, self
        assert not self.waiting or self.running == self._limits.max_running, self
        # A cancelled call leaves the queue slightly before its client's count decreases.
        assert self.running + self.waiting <= self._per_client.total(), self

    @asynccontextmanager
    async def _hold(self, client: str) -> AsyncIterator[None]:
        limit = self._limits.max_per_client
        if self._per_client[client] >= limit:
            raise StreamLimitError(
                f"this client has {limit} calls open, which is the limit; close one first",
                subject="client",
                retry_after_s=max(RETRY_RANGE_S[0], self._mean_call_s),
            )
        self._per_client[client] += 1
        try:
            if self.running < self._limits.max_running:
                self.running += 1
                self._on_change(self.running, len(self._waiters))
            else:
                await self._wait_for_slot()
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

    async def _wait_for_slot(self) -> None:
        if self.waiting >= self._limits.max_waiting:
            raise ServerBusyError(
                f"{self.running} requests run and {self.waiting} wait; try again later",
                subject="server",
                retry_after_s=self.retry_after_s,
            )
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(slot)
        self._on_change(self.running, len(self._waiters))
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self._hand_over()  # the slot was handed over in the same turn as the cancellation
            else:
                with suppress(ValueError):  # a hand-over may have skipped and removed it already
                    self._waiters.remove(slot)
                self._on_change(self.running, len(self._waiters))
            raise

    def _hand_over(self) -> None:
        while self._waiters:
            slot = self._waiters.popleft()
            if not slot.done():
                slot.set_result(None)
                break
        else:
            self.running -= 1
        self._on_change(self.running, len(self._waiters))


class LocalSlot:
    """`Slot` of an admission in this process; `stack` gives it back."""

    def __init__(
        self,
        hold: Callable[[], AbstractAsyncContextManager[None]],
        stack: AsyncExitStack,
        on_held: Callable[[], None],
    ) -> None:
        self._hold, self._stack, self._on_held = hold, stack, on_held
        self.is_held = False
        """Whether the call holds the slot."""

    def speak_behind(self, client: EngineClient) -> None:
        """See `Slot`: no engine knows it."""

    async def held(self) -> None:
        """See `Slot`."""
        if not self.is_held:
            await self._stack.enter_async_context(self._hold())
            self.is_held = True
            self._on_held()
