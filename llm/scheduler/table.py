"""`SequenceTable`: every live sequence, in exactly one place.

PENDING ─> PREFILLING ─> DECODING ──> gone
   ^  ^────────┘ (chunk)     │
   └──────── preempted ──────┘        PAUSED: next to PENDING and DECODING
                                      ENDING: its last token is being sampled
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from llm.scheduler.queue import PendingQueue
from llm.sequence import Sequence, SequenceStatus


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
        elif sequence.first_scheduled_s is not None:
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
