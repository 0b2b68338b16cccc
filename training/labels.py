"""Labels for every 10 ms of a line: the letter of the spoken word.

A word's letters are spread evenly over its time: inside a word they are approximate, but the
borders of words are exact, which is what the aligner is trained for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tts.speech.aligner import letter_labels as letters_of

FRAMES_PER_S = 100


@dataclass(frozen=True, slots=True)
class Phone:
    """One phone: the word that it belongs to, and its times in seconds."""

    word_index: int
    start_s: float
    end_s: float


def _frame(time_s: float) -> int:
    return round(time_s * FRAMES_PER_S)


def word_times(words: Sequence[str], phones: Sequence[Phone]) -> list[tuple[str, float, float]]:
    """Return every audible word, its start and its end in seconds."""
    spans: dict[int, tuple[float, float]] = {}
    for phone in phones:
        start, _ = spans.get(phone.word_index, (phone.start_s, 0.0))
        spans[phone.word_index] = (start, phone.end_s)
    return [(words[index], *span) for index, span in spans.items()]


def letter_labels(words: Sequence[str], phones: Sequence[Phone], num_frames: int) -> np.ndarray:
    """Return uint8 [num_frames]; 0 is silence."""
    labels = np.zeros(num_frames, np.uint8)
    for word, start_s, end_s in word_times(words, phones):
        first, last = _frame(start_s), min(_frame(end_s), num_frames)
        letters = letters_of(word)
        if letters and last > first:
            place = np.arange(last - first) * len(letters) // (last - first)
            labels[first:last] = np.array(letters, np.uint8)[place]
    return labels
