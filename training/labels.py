"""Words of a line with their times, and the letter that is spoken in every frame.

    text       h e l l o ,   y o u
    symbols  0 h ə l ˈ O ,   j u 0    with durations; 0 stands before and after a line
    word       ─────────     ───      without its punctuation

A word's letters are spread evenly over its time: inside a word they are approximate, but the
borders of words are exact, which is what the aligner is trained for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from training.kokoro.network import FRAME
from training.kokoro.vocoder import SAMPLE_RATE
from training.speech_lm.texts import Texts
from tts.speech.aligner import letter_labels as letters_of

SYMBOL_FRAME_S = FRAME / SAMPLE_RATE


class TimedWord(NamedTuple):
    """A word with letters, its start and its end in seconds."""

    text: str
    start_s: float
    end_s: float


def word_times(texts: Texts, row: int, durations: np.ndarray) -> tuple[TimedWord, ...]:
    """Return the words of a row of texts, by the durations of its symbols in the teacher's frames.

    There are none where the words of the text are not those of the symbols: where their numbers
    differ, and where a word has figures, or sounds but no letters.
    """
    if not texts.aligned[row]:
        return ()
    ends_s = np.cumsum(durations) * SYMBOL_FRAME_S
    found, first = [], 1  # symbol
    for pair in texts.words(row):
        text, sounds = pair[0].decode(), texts.bare(pair)[1]
        if re.search(r"\d", text) or bool(letters_of(text)) != bool(sounds):
            return ()
        if sounds:
            start = first + pair[1].index(sounds)
            span_s = ends_s[[start - 1, start + len(sounds) - 1]]
            found.append(TimedWord(text, *span_s.tolist()))
        first += len(pair[1]) + 1
    return tuple(found)


def letter_labels(words: Sequence[TimedWord], num_frames: int, frames_per_s: float) -> np.ndarray:
    """Return uint8 [num_frames]; 0 is silence."""
    labels = np.zeros(num_frames, np.uint8)
    for text, start_s, end_s in words:
        first, last = round(start_s * frames_per_s), min(round(end_s * frames_per_s), num_frames)
        if last > first:
            letters = np.array(letters_of(text), np.uint8)
            labels[first:last] = letters[np.arange(last - first) * len(letters) // (last - first)]
    return labels
