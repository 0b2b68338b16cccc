"""`Group`: the ranks a layer is split over. One rank is the null group: nothing to exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Group(ABC):
    """Rank, size, and the two collectives that tensor-parallel layers need."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of every rank's tensor, on every rank; may work in place."""

    @abstractmethod
    def all_gather(self, shard: Tensor) -> Tensor:
        """Every rank's tensor, joined along the last dimension, on every rank."""

    def signal_buffers(self) -> list[Tensor]:
        """Scratch of the collectives, one for each device; created when first asked for."""
        return []


class NullGroup(Group):
    """A single rank."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The tensor itself."""
        return partial

    def all_gather(self, shard: Tensor) -> Tensor:
        """The tensor itself."""
        return shard
