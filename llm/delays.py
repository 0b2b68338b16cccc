"""`FrameDelays`: codebooks that are generated later than others (MusicGen 2023, arXiv 2306.05284).

    delays 0 1 2    position   0  1  2  3  4
                    code 0     x  y  e  e  e      x, y: two audio frames
                    code 1     b  x  y  e  e      b: begin, e: end
                    code 2     b  b  x  y  e

A sequence has the positions, which are what the model sees. Audio frame n is complete at position
n + the longest delay. As soon as a codebook has its end code, the others run out in the order of
their delays, and the position of end codes alone ends the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FREE = -1  # the model chooses this code
Frame = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FrameDelays:
    """Position n holds code k of audio frame n - `table[k]`.

    Raises `ValueError` for a delay below 0, and for a table without a delay.
    """

    table: tuple[int, ...]  # positions, one for each codebook
    begin: int  # the code of a codebook before its first frame
    end: int  # the code of a codebook after its last frame

    def __post_init__(self) -> None:
        if min(self.table, default=0) < 0 or not any(self.table):
            raise ValueError(f"delays {self.table} must be 0 or more, and one of them more")

    @property
    def longest(self) -> int:
        """Return the number of positions between a frame's number and that of its last code."""
        return max(self.table)

    def delayed(self, frames: Sequence[Frame]) -> tuple[Frame, ...]:
        """Return the positions of a whole recording, the last of which has end codes alone."""

        def code(place: int, codebook: int) -> int:
            if place < 0:
                return self.begin
            return frames[place][codebook] if place < len(frames) else self.end

        return tuple(
            tuple(code(position - delay, k) for k, delay in enumerate(self.table))
            for position in range(len(frames) + self.longest + 1)
        )

    def aligned(self, positions: Sequence[Frame]) -> Frame:
        """Return the audio frame whose last code is in the last of `longest` + 1 positions."""
        return tuple(positions[delay][k] for k, delay in enumerate(self.table))

    def forced(self, generated: Sequence[object], *, ends: bool = True) -> Frame:
        """Return the codes of the position after those `generated`; `FREE` where none is forced.

        `generated` are all positions since the prompt. With `ends` False codebooks do not run out.
        """
        count, recent = len(generated), generated[-self.longest :] if ends else ()
        since = (
            len(recent) - place
            for place, codes in enumerate(recent)
            if isinstance(codes, tuple) and self.end in codes
        )
        passed = next(since, -1)  # positions since the first end code
        return tuple(
            self.begin if count < delay else self.end if passed >= delay else FREE
            for delay in self.table
        )
