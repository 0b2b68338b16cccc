"""How often a process that dies is started again, and how long it is waited each time."""

from __future__ import annotations

FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 10.0
STEADY_S = 60.0


class Restarts:
    """Counts deaths in a row. A process that was up for STEADY_S starts the count anew."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def __repr__(self) -> str:
        return f"Restarts({self.count} of {self._limit})"

    def next_delay_s(self, up_s: float) -> float | None:
        """Seconds to wait before the next start, twice as long each time; None: no more.

        `up_s` is how long the process had worked.
        """
        if up_s >= STEADY_S:
            self.count = 0
        if self.count >= self._limit:
            return None
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0**self.count)
        self.count += 1
        return delay_s
