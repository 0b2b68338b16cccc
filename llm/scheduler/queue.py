"""`PendingQueue`: sequences that wait for prefill, by priority and arrival.

front ── prompt remainders and preempted sequences, in the order they were put there
back ─── by arrival time − priority × ageing: a level of priority is worth `ageing_s` seconds
         of waiting, so whatever waits long enough comes first: nothing starves
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

from llm.sequence import Sequence

PRIORITY_AGEING_S = 5.0  # how much longer a request waits before one a level higher yields to it


class PendingQueue:
    """A queue with O(log n) push and pop, and removal from anywhere."""

    def __init__(self, ageing_s: float = PRIORITY_AGEING_S) -> None:
        self._ageing_s = ageing_s
        self._front: deque[Sequence] = deque()
        self._heap: list[tuple[float, int, Sequence]] = []
        self._arrivals = itertools.count()
        self._back: dict[Sequence, int] = {}  # what of the heap is still waiting, and its entry
        self.num_tokens = 0  # of all that wait

    def push(self, sequence: Sequence) -> None:
        """Wait for one's turn."""
        key = sequence.arrival_s - sequence.request.priority * self._ageing_s
        entry = next(self._arrivals)
        heapq.heappush(self._heap, (key, entry, sequence))
        self._back[sequence] = entry
        self.num_tokens += len(sequence.tokens)

    def push_front(self, sequence: Sequence) -> None:
        """Go before everybody who has not run yet."""
        key = _front_key(sequence)
        index = 0
        while index < len(self._front) and _front_key(self._front[index]) < key:
            index += 1
        self._front.insert(index, sequence)
        self.num_tokens += len(sequence.tokens)

    def peek(self) -> Sequence:
        """The next sequence; IndexError when there is none."""
        if self._front:
            return self._front[0]
        while not self._is_waiting(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def pop(self) -> Sequence:
        """Take the next sequence out."""
        sequence = self.peek()
        self.num_tokens -= len(sequence.tokens)
        if self._front:
            return self._front.popleft()
        heapq.heappop(self._heap)
        del self._back[sequence]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; ValueError when it is not here."""
        if self._back.pop(sequence, None) is None:
            self._front.remove(sequence)
        elif len(self._heap) > 2 * len(self._back) + 16:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
            heapq.heapify(self._heap)
        self.num_tokens -= len(sequence.tokens)

    def _is_waiting(self, entry: tuple[float, int, Sequence]) -> bool:
        return self._back.get(entry[2]) == entry[1]

    def holders(self) -> Iterator[Sequence]:
        """Sequences that wait with pages in hand, last in line first."""
        # Only those at the front can: pages are claimed when a prompt is first scheduled.
        return (sequence for sequence in reversed(self._front) if sequence.pages)

    def __len__(self) -> int:
        return len(self._front) + len(self._back)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        yield from (entry[2] for entry in sorted(self._heap) if self._is_waiting(entry))

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every sequence is here exactly once."""
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
