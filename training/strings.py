"""Many byte strings as one flat array, vectorised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def flat_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return indices of ranges [start, start + length), one range after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


class Strings:
    """Byte strings as one flat array."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self.length = np.array([len(string) for string in strings], np.int64)
        self.start = np.cumsum(self.length) - self.length
        self.bytes: np.ndarray = np.frombuffer(b"".join(strings), np.uint8)

    @classmethod
    def of(cls, flat: np.ndarray, start: np.ndarray, length: np.ndarray) -> Strings:
        """Return spans of an array of bytes."""
        strings = cls([])
        strings.bytes, strings.start, strings.length = flat, start, length
        return strings

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.bytes[self.start[i] : self.start[i] + self.length[i]]
