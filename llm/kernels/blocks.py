"""`Blocks`: the division of a product among programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """A program multiplies tiles of `block_out` outputs, with all inputs in chunks of `block_in`.

    `programs` share the tiles in turn; 0: one program per tile. `in_half`: products of float8 are
    added by chunks in float16. A thread has `registers` at most; None: as many as it takes.
    """

    block_out: int
    block_in: int
    num_warps: int
    programs: int = 0
    in_half: bool = False
    registers: int | None = None

    def grid(self, num_out: int) -> int:
        """Return the number of programs."""
        tiles = -(-num_out // self.block_out)
        return min(tiles, self.programs) if self.programs else tiles


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program multiplies `block_out` outputs with one of `splits` parts of the inputs, in chunks
    of `block_in`, of which `stages` are loaded at once. With `slots` all of its matrix is, and so
    many chunks of the rows, see `llm.kernels.early_products`.
    """

    block_out: int
    splits: int
    block_in: int
    num_warps: int
    stages: int
    slots: int = 0
