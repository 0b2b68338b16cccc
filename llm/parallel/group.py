"""`Group`: the ranks that a layer is split over. A single rank uses the null group."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Group(ABC):
    """Rank, size, and the two collectives of tensor-parallel layers."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors on every rank; may work in place."""

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """Return all ranks' tensors, joined along the last dimension, on every rank."""

    def signal_buffers(self) -> list[Tensor]:
        """Return scratch of the collectives, one tensor per device; created at the first call."""
        return []


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
