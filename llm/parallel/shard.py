"""`Shard`: the part of a matrix that one rank stores, and which heads and sizes can be split.

column-parallel    outputs are split: queries, keys, values, gate, up, the head
row-parallel       inputs are split: attention's output and down; ranks' products are summed
"""

from __future__ import annotations

from dataclasses import dataclass

from llm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """Indices [start, stop) of dimension `dim` of a matrix [out, in]."""

    dim: int
    start: int
    stop: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the part's shape."""
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects the part."""
        return (*[slice(None)] * self.dim, slice(self.start, self.stop))


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def heads(self, num_heads: int) -> range:
        """Return this rank's heads. Fewer heads than ranks are replicated."""
        if num_heads < self.size:
            first = self.rank * num_heads // self.size
            return range(first, first + 1)
        each = num_heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def num_heads(self, num_heads: int) -> int:
        """Return the number of heads of one rank."""
        return max(num_heads // self.size, 1)

    def part(self, dim: int, size: int) -> Part | None:
        """Return an equal part of a dimension; None for all of it."""
        if self.size == 1:
            return None
        each = size // self.size
        return Part(dim, self.rank * each, (self.rank + 1) * each)

    def head_part(self, dim: int, heads: range, head_dim: int) -> Part | None:
        """Return the part with these heads; None for all of it."""
        if self.size == 1:
            return None
        return Part(dim, heads.start * head_dim, heads.stop * head_dim)


def check_divisible(size: int, **sizes: int) -> None:
    """Raise `ConfigError` naming the sizes that cannot be split over `size` ranks.

    `num_key_value_heads` may also divide the number of ranks: such heads are replicated.
    """
    wrong = [
        f"{name}={value}"
        for name, value in sizes.items()
        if value % size and not (name == "num_key_value_heads" and size % value == 0)
    ]
    if wrong:
        raise ConfigError(
            f"model.device_specs names {size} devices, and {', '.join(wrong)} cannot be divided "
            f"by {size}"
        )
