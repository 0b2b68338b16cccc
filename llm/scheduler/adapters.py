"""How many adapters run at once. A request for one more waits at the gate; none is thrown out.

A request whose adapter runs may join it, also past others that wait. But when the first of those
has waited for `PATIENCE_S`, no request with an adapter starts before it: what runs comes to an
end, and a slot is free. Requests without an adapter always pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from llm.scheduler.queue import PendingQueue
from llm.sequence import Sequence

PATIENCE_S = 2.0
LOOK_AHEAD = 64  # waiting requests that are passed over, at most, to find one that may start


class ActiveAdapters:
    """How many sequences with pages use each adapter; '' stands for none."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    @property
    def names(self) -> Set[str]:
        """Adapters in use, as they are now."""
        return self._counts.keys()

    def take(self, name: str) -> None:
        """A sequence that uses it got its pages."""
        if name:
            self._counts[name] = self._counts.get(name, 0) + 1

    def leave(self, name: str) -> None:
        """It has no pages any more."""
        if not name:
            return
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise `AssertionError` unless the counts are those of the live sequences."""
        expected = Counter(sequence.lora for sequence in live if sequence.pages and sequence.lora)
        if self._counts != expected:
            raise AssertionError(f"{self!r}, but sequences use {dict(expected)}")

    def __repr__(self) -> str:
        return f"ActiveAdapters({self._counts})"


class AdapterGate:
    """One planning: sequences that have pages hold slots for the `active` adapters."""

    def __init__(
        self, limit: int | None, active: Set[str], pending: PendingQueue, now: float
    ) -> None:
        self._limit = limit
        self._pending = pending
        self._now = now
        self._waiting: list[Sequence] = []
        self._active = set(active)

    def skip_waiting(self) -> bool:
        """Step over requests that have to wait; False when nobody else is near the front."""
        while self._pending and not self._admits(self._pending.peek()):
            if len(self._waiting) == LOOK_AHEAD:
                return False
            self._waiting.append(self._pending.pop())
        return bool(self._pending)

    def _admits(self, sequence: Sequence) -> bool:
        name = sequence.lora
        if self._limit is None or not name or sequence.pages:
            return True
        if self._waiting:
            waited_s = self._now - self._waiting[0].arrival_s
            return name in self._active and waited_s < PATIENCE_S
        if name not in self._active and len(self._active) >= self._limit:
            return False
        self._active.add(name)
        return True

    def close(self) -> None:
        """Put those who wait back in front."""
        for sequence in self._waiting:
            self._pending.push_front(sequence)
