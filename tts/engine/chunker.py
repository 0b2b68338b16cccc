"""Cuts one request's speech codes into audio blocks.

A block is complete as soon as its last code has arrived; it is not held back to find out whether
more codes follow, so a full last block is returned before the end of the stream is known. With a
look-ahead a block waits for that many later codes, which are part of its window; at the end of
the stream the rest of the blocks have fewer. The blocks depend on the codes only, not on how many
arrive at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from decoder import SpeechChunk, grown_look_ahead


class SpeechChunker:
    """Chunker of one stream's codes into blocks of `chunk_sizes`, the last of which repeats.

    `chunk_sizes` None means a single block with all codes at the end of the stream. Codes of an
    incomplete last frame are dropped.
    """

    def __init__(
        self,
        chunk_sizes: tuple[int, ...] | None,
        *,
        look_ahead: int = 0,
        first_look_ahead: int | None = None,
        codes_per_frame: int = 1,
    ) -> None:
        """Create a chunker.

        `first_look_ahead` is the look-ahead of the first block and grows from there
        (`grown_look_ahead`); None: all blocks have `look_ahead`.
        """
        if chunk_sizes is not None and (not chunk_sizes or min(chunk_sizes) < 1):
            raise ValueError(f"chunk sizes {chunk_sizes} are not positive numbers")
        self._sizes = chunk_sizes
        self._most_look_ahead = look_ahead
        self._first_look_ahead = look_ahead if first_look_ahead is None else first_look_ahead
        self._codes_per_frame = codes_per_frame
        self._waiting: list[int] = []
        self._first_code = 0
        self._block_index = 0
        self._is_finished = False
        self._plan_next()
        self.num_missing = self._needed
        """Number of codes until the next block is complete; infinity: not before `finish`."""

    def __repr__(self) -> str:
        return (
            f"SpeechChunker(blocks={self._block_index}, decoded={self._first_code}, "
            f"waiting={len(self._waiting)}, finished={self._is_finished})"
        )

    @property
    def num_codes(self) -> int:
        """Number of codes pushed so far."""
        return self._first_code + len(self._waiting)

    @property
    def decoded_index(self) -> int:
        """Index of the first code that is not part of a block yet."""
        return self._first_code

    def push(self, codes: Iterable[int]) -> list[SpeechChunk]:
        """Add new codes; return the blocks that they complete, in order."""
        if self._is_finished:
            raise ValueError("codes after the end of the stream")
        self._waiting.extend(codes)
        ready: list[SpeechChunk] = []
        while len(self._waiting) >= self._needed:
            ready.append(self._cut(self._size))
        self.num_missing = self._needed - len(self._waiting)
        return ready

    def finish(self) -> list[SpeechChunk]:
        """End the stream; return the blocks of the remaining codes. Later calls return none."""
        self._is_finished = True
        del self._waiting[len(self._waiting) - len(self._waiting) % self._codes_per_frame :]
        ready = []
        while self._waiting:
            size = len(self._waiting) if self._sizes is None else self._size
            ready.append(self._cut(min(size, len(self._waiting))))
        return ready

    def _plan_next(self) -> None:
        """Set the size and the look-ahead of the next block; a single block has no size."""
        sizes = self._sizes
        if sizes is None:
            self._size, self._look_ahead, self._needed = 0, self._most_look_ahead, math.inf
            return
        first, most = self._first_look_ahead, self._most_look_ahead
        self._size = sizes[min(self._block_index, len(sizes) - 1)]
        self._look_ahead = grown_look_ahead(first, most, sizes[0], self._first_code)
        self._needed = self._size + self._look_ahead

    def _cut(self, size: int) -> SpeechChunk:
        future = tuple(self._waiting[size : size + self._look_ahead])
        codes = tuple(self._waiting[:size])
        chunk = SpeechChunk(codes, self._first_code, self._block_index, future)
        del self._waiting[:size]
        self._first_code += size
        self._block_index += 1
        self._plan_next()
        return chunk
