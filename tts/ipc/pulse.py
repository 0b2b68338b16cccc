"""`Pulse`: signs of life of another process, and when there are none any more."""

from __future__ import annotations

import asyncio
import time

LATE_S = 0.1


class Pulse:
    """Counts from the first sign on. One event loop."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s  # silence that is still life
        self._felt_s = 0.0
        self._began = asyncio.Event()

    def felt(self) -> None:
        """There was a sign, now."""
        self._felt_s = time.monotonic()
        self._began.set()

    @property
    def silence_s(self) -> float:
        """Seconds since the last sign; 0 before the first."""
        return time.monotonic() - self._felt_s if self._began.is_set() else 0.0

    async def stopped(self) -> None:
        """Until there was no sign for too long."""
        await self._began.wait()
        last_s = None
        while last_s != self._felt_s:
            last_s = self._felt_s
            await asyncio.sleep(max(0.0, last_s + self._limit_s - time.monotonic()))
            # When this process stood still itself, what came meanwhile is read first.
            await asyncio.sleep(LATE_S)
