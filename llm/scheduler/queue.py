"""`PendingQueue`: sequences that wait for prefill, by priority and arrival.

front ── prompt remainders and preempted sequences, in the order they were put there
back ─── by arrival time − priority × ageing: a level of priority is worth `ageing_s` seconds
         of waiting, so that no request starves
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

from llm.sequence import Sequence

PRIORITY_AGEING_S = 5.0  # additional waiting time per level of priority


class PendingQueue:
    """Priority queue with O(log n) push and pop, and removal from any position."""

    def __init__(self, ageing_s: float = PRIORITY_AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._front: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._back: dict[Sequence, int] = {}  # waiting sequences of the heap, and their entries
        self.num_tokens = 0  # sum over all waiting sequences

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence by priority and arrival."""
        key = sequence.arrival_s - sequence.request.priority * self._ageing_s
        entry = next(self._arrivals)
        heapq.heappush(self._heap, (key, entry, sequence))
        self._back[sequence] = entry
        self.num_tokens += len(sequence.tokens)

    def push_front(self, sequence: Sequence) -> None:
        """Queue a sequence in front of all that have not run yet."""
        key = _front_key(sequence)
        index = 0
        while index < len(self._front) and _front_key(self._front[index]) < key:
            index += 1
        self._front.insert(index, sequence)
        self.num_tokens += len(sequence.tokens)

    def peek(self) -> Sequence:
        """Return the next sequence; raises IndexError when the queue is empty."""
        if self._front:
            return self._front[0]
        while not self._is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Sequence:
        """Remove and return the next sequence."""
        sequence = self.peek()
        self.num_tokens -= len(sequence.tokens)
        if self._front:
            return self._front.popleft()
        heapq.heappop(self._heap)
        del self._back[sequence]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from any position; raises ValueError when it is not queued."""
        if self._back.pop(sequence, None) is None:
            self._front.remove(sequence)
        elif len(self._heap) > 2 * len(self._back) + 16:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
            heapq.heapify(self._heap)
        self.num_tokens -= len(sequence.tokens)

    def _is_waiting(self, entry: tuple[float, int, Sequence]) -> bool:
        return self._back.get(entry[2]) == entry[1]

    def holders(self) -> Iterator[Sequence]:
        """Iterate over waiting sequences that hold pages, last in line first."""
        # Only sequences at the front can: pages are claimed when a prompt is first scheduled.
        return (sequence for sequence in reversed(self._front) if sequence.pages)

    def __len__(self) -> int:
        return len(self._front) + len(self._back)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        yield from (entry[2] for entry in sorted(self._heap) if self._is_waiting(entry))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every sequence is queued exactly once."""
        ids = [sequence.request_id for sequence in self]
        if len(set(ids)) != len(ids) or len(ids) != len(self):
            raise AssertionError(f"{self!r} holds {ids}")
        if self.num_tokens != sum(len(sequence.tokens) for sequence in self):
            raise AssertionError(f"{self!r} miscounts its tokens: {self.num_tokens}")
        if any(sequence.pages for sequence in self._back):
            raise AssertionError(f"{self!r}: pages are held at the back")

    def __repr__(self) -> str:
        return f"PendingQueue({len(self._front)} in front, {len(self._back)} behind)"


def _front_key(sequence: Sequence) -> tuple[bool, float, float]:
    entry = math.inf if sequence.entry_order is None else sequence.entry_order
    return (not sequence.pages, sequence.arrival_s, entry)
