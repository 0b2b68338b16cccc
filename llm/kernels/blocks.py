"""`Blocks`: how a product is cut among programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Blocks:
    """A program multiplies tiles of `block_out` outputs, all inputs in chunks of `block_in`.

    `programs` share the tiles in turn; 0: there is one program for each tile.
    """

    block_out: int
    block_in: int
    num_warps: int
    programs: int = 0

    def grid(self, num_out: int) -> int:
        """How many programs to start."""
        tiles = -(-num_out // self.block_out)
        return min(tiles, self.programs) if self.programs else tiles
