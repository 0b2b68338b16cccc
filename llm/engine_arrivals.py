"""`Arrivals`: new requests on their way into the scheduler, a bounded number per turn.

However many come at once, a turn is not held up by them for long.
"""

from __future__ import annotations

from llm.scheduler import Scheduler
from llm.sequence import Sequence

BATCHES_PER_TURN = 2  # as many requests as fill so many batches


class Arrivals:
    """In the order they came. Used on the engine thread only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._per_turn = BATCHES_PER_TURN * scheduler.max_batch_size
        self._may_enter = 0  # in this turn
        self._queue: dict[str, Sequence] = {}

    def begin_turn(self) -> None:
        """Let as many enter as may in one turn."""
        self._may_enter = self._per_turn
        while self._queue and self._may_enter:
            self.enter(next(iter(self._queue)))

    def add(self, sequence: Sequence) -> None:
        """A request whose id is not alive; it enters at once if there is nothing against it."""
        self._queue[sequence.request_id] = sequence
        if self._may_enter:
            self.enter(sequence.request_id)

    def enter(self, request_id: str) -> None:
        """Let one enter, if it is here, because somebody wants something of it."""
        sequence = self._queue.pop(request_id, None)
        if sequence is not None:
            self._may_enter = max(self._may_enter - 1, 0)
            self._scheduler.add(sequence)

    def enter_all(self) -> None:
        """Let everybody enter."""
        while self._queue:
            self.begin_turn()

    def __len__(self) -> int:
        return len(self._queue)
