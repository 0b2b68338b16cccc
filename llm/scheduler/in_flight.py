"""`StepsInFlight`: the batches that were scheduled and whose results have not come.

    schedule(n) ─> launch(n) ─> schedule(n + 1) ─> commit(n) ─> launch(n + 1) ─> …
                                      └── feeds FUTURE_TOKEN where batch n is still sampling

One batch at most without planning ahead, two with it. A sequence that ends while a later batch
holds it keeps its pages, which that batch writes to, until that batch has ended too.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

from llm.batch import ScheduledBatch, ScheduledRow
from llm.kv_cache.manager import KVCacheManager
from llm.sequence import Sequence


@dataclass(eq=False, slots=True)
class Step:
    """A batch and the sequences of its rows: a request id may be used again by then."""

    batch: ScheduledBatch
    sequences: tuple[Sequence, ...]
    is_launched: bool = False

    def pairs(self) -> zip[tuple[ScheduledRow, Sequence]]:
        """Rows and their sequences."""
        return zip(self.batch.rows, self.sequences, strict=True)


class StepsInFlight:
    """In the order they were scheduled, which is the order they are committed in."""

    def __init__(self, kv_manager: KVCacheManager, limit: int) -> None:
        self._kv = kv_manager
        self._limit = limit
        self._steps: deque[Step] = deque()
        self._departed: dict[Sequence, str] = {}  # ended with pages a step still writes to
        self._departures = itertools.count()

    def check_room(self) -> None:
        """Raise `RuntimeError` when no further batch may be scheduled now."""
        if len(self._steps) >= self._limit:
            raise RuntimeError("the last batch was neither committed nor failed")
        if self._steps and not self._steps[-1].is_launched:
            raise RuntimeError("the last batch was not launched")

    def add(self, batch: ScheduledBatch, sequences: tuple[Sequence, ...]) -> None:
        """A batch was scheduled."""
        self._steps.append(Step(batch, sequences))

    def newest(self, batch: ScheduledBatch) -> Step:
        """The step of a batch that is to be launched."""
        if not self._steps or self._steps[-1].batch is not batch:
            raise RuntimeError("this batch is not the last one scheduled")
        return self._steps[-1]

    def take(self, batch: ScheduledBatch) -> Step:
        """The step of a batch that has ended, which must be the oldest."""
        if not self._steps or self._steps[0].batch is not batch:
            raise RuntimeError("this batch is not the running one")
        return self._steps.popleft()

    def take_failed(self, batch: ScheduledBatch) -> Step:
        """The step of a batch that came to nothing, whether or not an older one still runs."""
        for step in self._steps:
            if step.batch is batch:
                self._steps.remove(step)
                return step
        raise RuntimeError("this batch is not a running one")

    def release_later(self, sequence: Sequence) -> None:
        """The sequence has ended, and a step still holds it. Its id is free at once."""
        name = f"{sequence.request_id}/departed-{next(self._departures)}"
        self._kv.rename(sequence.request_id, name)
        self._departed[sequence] = name

    def release_departed(self, step: Step) -> list[Sequence]:
        """Free the pages of those who only waited for this step to end; who they were."""
        released: list[Sequence] = []
        if not self._departed:
            return released
        for sequence in step.sequences:
            if not sequence.in_flight and sequence in self._departed:
                name = self._departed.pop(sequence)
                self._kv.release(name, sequence.tokens, sequence.processed)
                sequence.pages = ()
                released.append(sequence)
        return released

    @property
    def num_departed(self) -> int:
        """Ended sequences that still hold pages."""
        return len(self._departed)

    def __len__(self) -> int:
        return len(self._steps)

    def counts(self) -> Counter[Sequence]:
        """How many steps hold each sequence."""
        return Counter(sequence for step in self._steps for sequence in step.sequences)

    def __repr__(self) -> str:
        rows = " + ".join(str(len(step.batch.rows)) for step in self._steps)
        return f"{rows} rows running" if rows else "idle"
