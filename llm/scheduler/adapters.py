"""Number of adapters that run at once. A request for one more waits; none is evicted.

A request whose adapter is active may start before others that wait. But when the first of those has
waited for `PATIENCE_S`, no request with an adapter starts before it, so that a slot becomes free.
Requests without an adapter are not limited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from llm.scheduler.table import PendingQueue
from llm.sequence import Sequence

PATIENCE_S = 2.0
LOOK_AHEAD = 64  # maximum number of waiting requests that are skipped to find one that can start


class ActiveAdapters:
    """Number of sequences with pages per adapter."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @property
    def names(self) -> Set[str]:
        """Return the adapters in use, a live view."""
        return self._counts.keys()

    def take(self, name: str) -> None:
        """Count a sequence that got its pages."""
        self._counts[name] = self._counts.get(name, 0) + 1

    def leave(self, name: str) -> None:
        """Count a sequence that lost its pages."""
        if not name:
            return
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise `AssertionError` unless the counts equal those of the live sequences."""
        expected = Counter(sequence.lora for sequence in live if sequence.pages and sequence.lora)
        if self._counts != expected:
            raise AssertionError(f"{self!r}, but sequences use {dict(expected)}")

    def __repr__(self) -> str:
        return f"ActiveAdapters({self._counts})"


class AdapterAdmission:
    """Admission of adapters while one batch is planned; sequences with pages hold slots for
    `active` adapters.
    """

    def __init__(self, limit: int, active: Set[str], pending: PendingQueue, now: float) -> None:
        self._limit = limit
        self._pending = pending
        self._now = now
        self._waiting: list[Sequence] = []
        self._active = set(active)

    def skip_waiting(self) -> bool:
        """Skip requests that have to wait; return False when no other request is within reach."""
        while self._pending and not self._admits(self._pending.peek()):
            if len(self._waiting) == LOOK_AHEAD:
                return False
            self._waiting.append(self._pending.pop())
        return bool(self._pending)

    def _admits(self, sequence: Sequence) -> bool:
        name = sequence.lora
        if not name or sequence.pages:
            return True
        if self._waiting:
            waited_s = self._now - self._waiting[0].arrival_s
            return name in self._active and waited_s < PATIENCE_S
        if name not in self._active and len(self._active) >= self._limit:
            return False
        self._active.add(name)
        return True

    def close(self) -> None:
        """Put the skipped requests back to the front."""
        for sequence in self._waiting:
            self._pending.push_front(sequence)
