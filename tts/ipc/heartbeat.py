"""`Heartbeat`: detects that another process is no longer alive."""

from __future__ import annotations

import asyncio
import time

LATE_S = 0.1


class Heartbeat:
    """Heartbeats of another process, counted from the first one. Belongs to one event loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s  # maximum interval of a live process
        self._last_s = 0.0
        self._began = asyncio.Event()

    def beat(self) -> None:
        """Record a heartbeat."""
        self._last_s = time.monotonic()
        self._began.set()

    @property
    def silence_s(self) -> float:
        """Seconds since the last heartbeat; 0 before the first."""
        return time.monotonic() - self._last_s if self._began.is_set() else 0.0

    async def began(self) -> None:
        """Wait for the first heartbeat."""
        await self._began.wait()

    async def stopped(self) -> None:
        """Wait until the heartbeats stop for longer than the limit."""
        await self._began.wait()
        seen_s = None
        while seen_s != self._last_s:
            seen_s = self._last_s
            await asyncio.sleep(max(0.0, seen_s + self._limit_s - time.monotonic()))
            # If this process was suspended, heartbeats that arrived meanwhile are read first.
            await asyncio.sleep(LATE_S)
