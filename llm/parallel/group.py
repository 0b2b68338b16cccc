"""`Group`: the ranks that a layer is split over. A single rank uses the null group."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from llm.parallel.peer_memory import Mailbox, Shelf


class Group(ABC):
    """Rank, size, the two collectives of tensor-parallel layers, and a number of the host.

    Every rank calls the same collectives in the same order, with tensors of the same shape.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors on every rank; may work in place."""

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """Return all ranks' tensors, joined along the last dimension, on every rank."""

    @abstractmethod
    def minimum(self, number: int) -> int:
        """Return the smallest of the ranks' numbers on every rank; the host waits."""

    def mailbox(self, number: int) -> Mailbox | None:
        """Return one of two mailboxes for sums within kernels; None where there are none."""
        return None

    def shelf(self, num_rows: int, num_columns: int) -> Shelf | None:
        """Return memory from which the ranks read each other's rows float32 [num_rows,
        num_columns]; None where there is none. All ranks call it with the same numbers.
        """
        return None

    def signal_buffers(self) -> list[Tensor]:
        """Return scratch of the collectives, one tensor per device; created at the first call."""
        return []

    def abort(self) -> None:
        """End NCCL's collectives that wait for a rank that has ended; they raise. Kernels that wait
        for its memory end with this process. Returns at once; callable from any thread.
        """
        return

    def close(self) -> None:
        """Close the connections to the other ranks. Idempotent."""
        return


class NullGroup(Group):
    """A single rank."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the tensor itself."""
        return partial

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the tensor itself."""
        return shard

    def minimum(self, number: int) -> int:
        """Return the number itself."""
        return number
