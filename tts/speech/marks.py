"""Marks of a document that wait for their times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from tts.speech.types import MarkTime
from tts.text.markup.document import Mark


class MarkQueue:
    """Queue of marks in the order of the text. Their times never decrease."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()
        self._last_s = 0.0

    def add(self, mark: Mark) -> None:
        """Add a mark whose time is not known yet."""
        self._marks.append(mark)

    def reached(self, time_s: float, position: float = math.inf) -> Iterator[MarkTime]:
        """Yield the marks in front of a position of the text, whose audio begins at `time_s`."""
        while self._marks and self._marks[0].start <= position:
            mark, self._last_s = self._marks.popleft(), max(self._last_s, time_s)
            yield MarkTime(mark.kind, mark.name, self._last_s, mark.start, mark.end)
