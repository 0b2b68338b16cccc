"""`AdapterGate`: how many adapters run at once. A request for one more waits; none is thrown out.

A request whose adapter runs may join it, also past others that wait. But when the first of those
has waited for `PATIENCE_S`, no request with an adapter starts before it: what runs comes to an
end, and a slot is free. Requests without an adapter always pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from llm.scheduler.queue import PendingQueue
from llm.sequence import Sequence

PATIENCE_S = 2.0
LOOK_AHEAD = 64  # waiting requests that are passed over, at most, to find one that may start


class AdapterGate:
    """One planning: `live` are all sequences; those with pages hold their adapter's slot."""

    def __init__(
        self, limit: int | None, live: Iterable[Sequence], pending: PendingQueue, now: float
    ) -> None:
        self._limit = limit
        self._pending = pending
        self._now = now
        self._waiting: list[Sequence] = []
        self._active: set[str] = set()
        if limit is not None:
            self._active = {sequence.lora for sequence in live if sequence.pages and sequence.lora}

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
