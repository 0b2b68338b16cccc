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

    def joined(self, order: np.ndarray, joint: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return strings one after another, each followed by `joint`; and their starts and the
        end.
        """
        length = self.length[order]
        bounds = np.concatenate([[0], np.cumsum(length + len(joint))])
        flat = np.empty(int(bounds[-1]), np.uint8)
        flat[flat_index(bounds[:-1], length)] = self.bytes[flat_index(self.start[order], length)]
        for place, byte in enumerate(joint, start=-len(joint)):
            flat[bounds[1:] + place] = byte
        return flat, bounds
