"""Labels for every 10 ms of a line: the phone, and the letter of the spoken word.

A word's letters are spread evenly over its time: inside a word they are approximate, but the
borders of words are exact, which is what the aligner is trained for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from training.teacher import SAMPLE_RATE, Phone
from tts.speech.aligner import letter_labels as letters_of

FRAME = 160  # samples
SILENCE = 0
PHONES = (
    "aa", "ae", "ah", "ao", "aw", "ax", "ay", "b", "ch", "d", "dh", "eh", "er", "ey", "f", "g",
    "hh", "ih", "iy", "jh", "k", "l", "m", "n", "ng", "ow", "oy", "p", "r", "s", "sh", "t", "th",
    "uh", "uw", "v", "w", "y", "z", "zh",
)  # fmt: skip
NUM_PHONE_LABELS = len(PHONES) + 1

_PHONE_LABEL = {name: label for label, name in enumerate(PHONES, start=1)}


def _frame(time_s: float) -> int:
    return round(time_s * SAMPLE_RATE / FRAME)


def phone_labels(phones: Sequence[Phone], num_frames: int) -> np.ndarray:
    """Return uint8 [num_frames]; 0 is silence."""
    labels = np.zeros(num_frames, np.uint8)
    for phone in phones:
        name = phone.name.rstrip("012")
        labels[_frame(phone.start_s) : _frame(phone.end_s)] = _PHONE_LABEL.get(name, SILENCE)
    return labels


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
