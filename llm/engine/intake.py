"""`IntakeQueue`: new requests that the scheduler has not received yet; bounded per turn.

The bound keeps a burst of requests from delaying a turn.
"""

from __future__ import annotations

from llm.scheduler import Scheduler
from llm.sequence import Sequence

BATCHES_PER_TURN = 2  # requests admitted per turn, in batches


class IntakeQueue:
    """Queue of new requests in order of arrival. Used on the engine thread only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._per_turn = BATCHES_PER_TURN * scheduler.max_batch_size
        self._num_admissible = 0  # requests that can still be admitted in this turn
        self._queue: dict[str, Sequence] = {}

    def begin_turn(self) -> None:
        """Begin a turn and reset the number of requests that it may admit."""
        self._num_admissible = self._per_turn
        while self._queue and self._num_admissible:
            self.admit(next(iter(self._queue)))

    def add(self, sequence: Sequence) -> None:
        """Add a request whose id is not in use; it is admitted at once if the turn allows it."""
        self._queue[sequence.request_id] = sequence
        if self._num_admissible:
            self.admit(sequence.request_id)

    def admit(self, request_id: str) -> None:
        """Admit one request, if it is in the queue, because a command refers to it."""
        sequence = self._queue.pop(request_id, None)
        if sequence is not None:
            self._num_admissible = max(self._num_admissible - 1, 0)
            self._scheduler.add(sequence)

    def admit_all(self) -> None:
        """Admit all queued requests."""
        while self._queue:
            self.begin_turn()

    def __len__(self) -> int:
        return len(self._queue)
