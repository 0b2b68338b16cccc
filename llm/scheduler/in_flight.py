"""`StepsInFlight`: batches that were scheduled and are not committed yet."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

from llm.batch import ScheduledBatch, ScheduledRow
from llm.kv_cache.manager import KVCacheManager
from llm.sequence import Sequence


@dataclass(eq=False, slots=True)
class Step:
    """A batch and the sequences of its rows, because request ids may be reused before it ends."""

    batch: ScheduledBatch
    sequences: tuple[Sequence, ...]
    is_launched: bool = False

    def pairs(self) -> zip[tuple[ScheduledRow, Sequence]]:
        """Return pairs of rows and sequences."""
        return zip(self.batch.rows, self.sequences, strict=True)


class StepsInFlight:
    """Steps in the order in which they were scheduled, which is the order of commits."""

    def __init__(self, kv_manager: KVCacheManager, limit: int) -> None:
        self._kv = kv_manager
        self._limit = limit
        self._steps: deque[Step] = deque()
        self._ended: dict[Sequence, str] = {}  # ended sequences whose pages a step still writes to
        self._departures = itertools.count()

    def check_room(self) -> None:
        """Raise `RuntimeError` when no further batch may be scheduled now."""
        if len(self._steps) >= self._limit:
            raise RuntimeError("the last batch was neither committed nor failed")
        if self._steps and not self._steps[-1].is_launched:
            raise RuntimeError("the last batch was not launched")

    def add(self, batch: ScheduledBatch, sequences: tuple[Sequence, ...]) -> None:
        """Add a batch that was scheduled."""
        self._steps.append(Step(batch, sequences))

    def newest(self, batch: ScheduledBatch) -> Step:
        """Return the step of a batch that is about to be launched."""
        if not self._steps or self._steps[-1].batch is not batch:
            raise RuntimeError("this batch is not the last one scheduled")
        return self._steps[-1]

    def take(self, batch: ScheduledBatch) -> Step:
        """Remove and return the step of a batch that has ended, which must be the oldest."""
        if not self._steps or self._steps[0].batch is not batch:
            raise RuntimeError("this batch is not the running one")
        return self._steps.popleft()

    def take_failed(self, batch: ScheduledBatch) -> Step:
        """Remove and return the step of a failed batch, also while an older one still runs."""
        for step in self._steps:
            if step.batch is batch:
                self._steps.remove(step)
                return step
        raise RuntimeError("this batch is not a running one")

    def defer_release(self, sequence: Sequence) -> None:
        """Defer the release of a sequence that has ended but is part of a step. Its id is free at
        once.
        """
        name = f"{sequence.request_id}/departed-{next(self._departures)}"
        self._kv.rename(sequence.request_id, name)
        self._ended[sequence] = name

    def release_ended(self, step: Step) -> list[Sequence]:
        """Free the pages of ended sequences that no step holds any more; return those sequences."""
        released: list[Sequence] = []
        if not self._ended:
            return released
        for sequence in step.sequences:
            if not sequence.in_flight and sequence in self._ended:
                name = self._ended.pop(sequence)
                self._kv.release(name, sequence.tokens, sequence.processed)
                sequence.pages = ()
                released.append(sequence)
        return released

    @property
    def num_ended(self) -> int:
        """Number of ended sequences that still hold pages."""
        return len(self._ended)

    def __len__(self) -> int:
        return len(self._steps)

    def counts(self) -> Counter[Sequence]:
        """Return the number of steps that hold each sequence."""
        return Counter(sequence for step in self._steps for sequence in step.sequences)

    def __repr__(self) -> str:
        rows = " + ".join(str(len(step.batch.rows)) for step in self._steps)
        return f"{rows} rows running" if rows else "idle"
