"""`SequenceTable`: every live sequence, in exactly one place.

PENDING ─> PREFILLING ─> DECODING ──> gone
   ^  ^────────┘ (chunk)     │
   └──────── preempted ──────┘        PAUSED: next to PENDING and DECODING
                                      ENDING: its last token is being sampled

`PendingQueue` is the place of those that wait for prefill.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator

from llm.sequence import Sequence, SequenceStatus

PRIORITY_AGEING_S = 5.0  # additional waiting time per level of priority


class SequenceTable:
    """The pending queue, the decode set, the sequences in prefill, and the paused ones."""

    def __init__(self) -> None:
        self._live: dict[str, Sequence] = {}
        self._entries = itertools.count()
        self.pending = PendingQueue()
        self.prefilling: dict[str, Sequence] = {}
        self.decoding: dict[str, Sequence] = {}  # in order of first entry
        self.paused: dict[str, Sequence] = {}
        self.ending: dict[str, Sequence] = {}

    def get(self, request_id: str) -> Sequence | None:
        """Return the live sequence of that id, or None."""
        return self._live.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence to the pending queue."""
        if sequence.request_id in self._live:
            raise ValueError(f"request {sequence.request_id} is in use already")
        self._live[sequence.request_id] = sequence
        self.pending.push(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self.remove(sequence)
        del self._live[sequence.request_id]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from its place; it stays live."""
        status = sequence.status
        sequence.status = SequenceStatus.FINISHED
        if status is SequenceStatus.PENDING:
            self.pending.remove(sequence)
        elif status is SequenceStatus.PREFILLING:
            del self.prefilling[sequence.request_id]
        elif status is SequenceStatus.DECODING:
            del self.decoding[sequence.request_id]
        elif status is SequenceStatus.PAUSED:
            del self.paused[sequence.request_id]
        elif status is SequenceStatus.ENDING:
            del self.ending[sequence.request_id]

    def queue_in_front(self, sequence: Sequence) -> None:
        """Put a sequence at the head of the pending queue."""
        self.remove(sequence)
        sequence.status = SequenceStatus.PENDING
        self.pending.push_front(sequence)

    def prefill_next(self) -> Sequence:
        """Move the head of the pending queue into the batch that is being planned."""
        sequence = self.pending.pop()
        sequence.status = SequenceStatus.PREFILLING
        self.prefilling[sequence.request_id] = sequence
        return sequence

    def decode(self, sequence: Sequence) -> None:
        """Put a sequence into the decode set; one that returns gets its former position."""
        self.remove(sequence)
        sequence.status = SequenceStatus.DECODING
        if sequence.entry_order is None:
            sequence.entry_order = next(self._entries)
            self.decoding[sequence.request_id] = sequence
            return
        members = [*self.decoding.values(), sequence]
        members.sort(key=entry_order)
        self.decoding = {member.request_id: member for member in members}

    def end(self, sequence: Sequence) -> None:
        """Set aside a sequence whose last token is being sampled."""
        self.remove(sequence)
        sequence.status = SequenceStatus.ENDING
        self.ending[sequence.request_id] = sequence

    def pause(self, sequence: Sequence) -> None:
        """Pause a sequence."""
        self.remove(sequence)
        sequence.status = SequenceStatus.PAUSED
        self.paused[sequence.request_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Put a paused sequence back to the place that its tokens require."""
        if not sequence.needs_extend:
            self.decode(sequence)
        elif sequence.pages or sequence.first_scheduled_s is not None:
            self.queue_in_front(sequence)
        else:
            self.remove(sequence)
            sequence.status = SequenceStatus.PENDING
            self.pending.push(sequence)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every live sequence is in the place its status names."""
        places = (
            (SequenceStatus.PENDING, list(self.pending)),
            (SequenceStatus.PREFILLING, list(self.prefilling.values())),
            (SequenceStatus.DECODING, list(self.decoding.values())),
            (SequenceStatus.PAUSED, list(self.paused.values())),
            (SequenceStatus.ENDING, list(self.ending.values())),
        )
        found = [sequence for _, members in places for sequence in members]
        if len(found) != len(self._live) or set(found) != set(self._live.values()):
            raise AssertionError(f"{self!r}: {len(found)} of {len(self._live)} found")
        for status, members in places:
            for sequence in members:
                if sequence.status is not status:
                    raise AssertionError(f"{sequence!r} is among the {status.value}")
        orders = [entry_order(sequence) for sequence in self.decoding.values()]
        if orders != sorted(orders):
            raise AssertionError(f"{self!r}: the decode set is out of order")
        self.pending.check_integrity()

    def __repr__(self) -> str:
        return (
            f"SequenceTable({len(self.pending)} pending, {len(self.prefilling)} prefilling, "
            f"{len(self.decoding)} decoding, {len(self.paused)} paused)"
        )


def entry_order(sequence: Sequence) -> int:
    """Return the order in which the sequence first began to decode; -1 before."""
    return -1 if sequence.entry_order is None else sequence.entry_order


class PendingQueue:
    """Sequences that wait for prefill, with O(log n) push and pop, and removal from any position.

    front ── prompt remainders and preempted sequences, in the order they were put there
    back ─── by arrival time − priority × ageing: a level of priority is worth `ageing_s` seconds
             of waiting, so that no request starves
    """

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
        # Only sequences at the front can: they have run, or have a transfer's pages.
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
