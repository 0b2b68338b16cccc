"""Ranks of a group in the threads of one process.

Their collectives meet at a barrier instead of gloo, whose own threads have ended the process when
several of its ranks lived in one. Gloo's ranks have a process each, as in `test_ranks.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from llm.parallel.group import Group
from tests.deadlines import HANG_S

T = TypeVar("T")


class Meeting:
    """Where the ranks exchange what each has."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=HANG_S)
        self.given: list[Any] = [None] * size


class ThreadGroup(Group):
    """One rank of several threads. Sums are taken in the order of ranks, as on CPUs."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.given)
        self._meeting = meeting

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group`."""
        first, *others = self._exchange(partial.clone())
        return sum(others, start=first)

    def all_gather(self, shard: Tensor) -> Tensor:
        """See `Group`."""
        return torch.cat(self._exchange(shard.clone()), dim=-1)

    def minimum(self, number: int) -> int:
        """See `Group`."""
        return min(self._exchange(number))

    def _exchange(self, own: T) -> list[T]:
        """Return what all ranks give, in rank order. Raises `BrokenBarrierError` when one ended."""
        self._meeting.given[self.rank] = own
        self._meeting.barrier.wait()
        found = list(self._meeting.given)
        self._meeting.barrier.wait()  # nothing is replaced before all have read it
        return found


def on_ranks(size: int, work: Callable[[Group], T]) -> list[T]:
    """Run `work` on `size` ranks; return the results in rank order. Raises the first error."""
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
