"""Emphasis: words of a sentence that are spoken slower and louder, or faster and softer.

The language model speaks the sentence as without emphasis, so that its melody is not interrupted;
the aligner's word times say where the words are, and the sound there is changed:

    samples   … | word      | …         word times: start, end
    output    … | w o r d     | …       stretched, with its gain; the rest is unchanged
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from decoder import stretch_part
from tts.speech.word_times import WordSpan
from tts.text.markup.document import Document, Spoken
from tts.text.segmenter import SpokenWord, TextSegment

RAMP_S = 0.015  # half of a gain's rise or fall


class Stress(NamedTuple):
    """Change of an emphasised word."""

    rate: float
    gain_db: float


STRESSES = {
    "strong": Stress(0.8, 4.0),
    "moderate": Stress(0.88, 2.5),
    "reduced": Stress(1.15, -4.0),
}
"""Changes by the level of SSML's `emphasis`."""


class Timeline:
    """Times in a sound that was stretched in parts, by those in the sound before."""

    def __init__(self, before_s: Sequence[float], after_s: Sequence[float]) -> None:
        """Create one of the times of the same samples, in order; it is linear between them."""
        self._before_s, self._after_s = before_s, after_s
        self.end_s = after_s[-1]
        """End of the stretched sound."""

    def __call__(self, time_s: float) -> float:
        return min(float(np.interp(time_s, self._before_s, self._after_s)), self.end_s)

    @property
    def added_s(self) -> float:
        """Seconds by which the sound is longer than before."""
        return self._after_s[-1] - self._before_s[-1]

    def cut(self, end_s: float) -> None:
        """End the stretched sound at a time: no time is later."""
        self.end_s = end_s


@dataclass(frozen=True, slots=True)
class EmphasisedWords:
    """Emphasised words of a segment, and the level of each."""

    levels: dict[SpokenWord, str]

    @classmethod
    def of(cls, segment: TextSegment, document: Document) -> EmphasisedWords:
        """Return the words of a segment that have an emphasis in its document."""
        parts = [p for p in document.parts if isinstance(p, Spoken) and p.style.emphasis]
        return cls(
            {
                word: part.style.emphasis
                for word in segment.words
                for part in parts
                if part.start < word.end and word.start < part.end
            }
        )

    def __bool__(self) -> bool:
        return bool(self.levels)

    def applied(
        self, samples: np.ndarray, spans: Sequence[WordSpan], rate: int
    ) -> tuple[np.ndarray, Timeline]:
        """Return a segment's samples, float32 [S] at `rate` Hz, with its words emphasised, and
        where its times are then.

        `spans` are the times of all of its words.
        """
        ranges = self._ranges(spans)
        samples = samples.copy()
        for start_s, end_s, level in ranges:
            _amplify(samples, start_s, end_s, STRESSES[level].gain_db, rate)
        found, place, size = [], 0, 0
        knots = [(0.0, 0.0)]
        for start_s, end_s, level in ranges:
            start, end = (min(round(time_s * rate), len(samples)) for time_s in (start_s, end_s))
            start = max(start, place)  # a stretched word may end a few milliseconds later
            found.append(samples[place:start])
            part, place = stretch_part(samples, (start, end), STRESSES[level].rate, rate)
            size += len(found[-1])
            knots.append((start / rate, size / rate))
            found.append(part)
            size += len(part)
            knots.append((place / rate, size / rate))
        found.append(samples[place:])
        knots.append((len(samples) / rate, (size + len(found[-1])) / rate))
        before_s, after_s = zip(*knots, strict=True)
        return np.concatenate(found), Timeline(before_s, after_s)

    def _ranges(self, spans: Sequence[WordSpan]) -> list[tuple[float, float, str]]:
        """Return start, end and level of the emphasised words; neighbours of one level are one."""
        ranges = []
        for level, group in groupby(spans, lambda span: self.levels.get(span.word, "")):
            words = list(group)
            if level:
                ranges.append((words[0].start_s, words[-1].end_s, level))
        return ranges


def _amplify(samples: np.ndarray, start_s: float, end_s: float, gain_db: float, rate: int) -> None:
    """Change the level of the samples from one time to another, without steps."""
    edges = [start_s - RAMP_S, start_s + RAMP_S, end_s - RAMP_S, end_s + RAMP_S]
    first = max(0, round(edges[0] * rate))
    part = samples[first : round(edges[-1] * rate)]
    times_s = (first + np.arange(len(part))) / rate
    gains_db = np.interp(times_s, np.maximum.accumulate(edges), [0.0, gain_db, gain_db, 0.0])
    part *= (10.0 ** (gains_db / 20)).astype(np.float32)
