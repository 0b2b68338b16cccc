"""`Blocks`: the division of a product among programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """A program multiplies tiles of `block_out` outputs, with all inputs in chunks of `block_in`.

    `programs` share the tiles in turn; 0: one program per tile. `in_half`: products of float8 are
    added by chunks in float16.
    """

    block_out: int
    block_in: int
    num_warps: int
    programs: int = 0
    in_half: bool = False

    def grid(self, num_out: int) -> int:
        """Return the number of programs."""
        tiles = -(-num_out // self.block_out)
        return min(tiles, self.programs) if self.programs else tiles


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program multiplies `block_out` outputs with one of `splits` parts of the inputs. It loads
    the rows in chunks of `block_in` inputs, `stages` of them at once.
    """

    block_out: int
    splits: int
    block_in: int
    num_warps: int
    stages: int

    def chunks(self, num_in: int) -> int:
        """Return the number of chunks of a part of the inputs."""
        return max(1, -(-num_in // (self.splits * self.block_in)))

    def shared_bytes(self, num_in: int, num_rows: int, *, parts: int = 1) -> int:
        """Return the bytes of a program's shared memory: its share of `parts` matrices and the
        chunks of so many rows, in numbers of 2 bytes, and a factor of 4 bytes for each row.
        """
        chunks = self.chunks(num_in)
        lines = chunks * parts * self.block_out + min(self.stages, chunks) * num_rows
        return 2 * self.block_in * lines + 4 * num_rows
