"""Word error rate of a recogniser's output, and the recogniser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

RECOGNISER_RATE = 16_000  # Hz, what pocketsphinx's US-English model was trained on


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Wrong words (substituted, deleted, inserted) and the number of reference words."""

    wrong: int = 0
    words: int = 0

    @property
    def rate(self) -> float:
        return self.wrong / self.words if self.words else 0.0

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(self.wrong + other.wrong, self.words + other.words)


def words_of(text: str) -> list[str]:
    """Return lower-case words; apostrophes belong to them, all other signs separate them."""
    return re.findall(r"[a-z']+", text.lower())


def edit_distance(meant: Sequence[str], heard: Sequence[str]) -> int:
    """Return the fewest insertions, deletions and substitutions that turn one list into the other.

    Wagner and Fischer 1974, one column of the table at a time.
    """
    column = list(range(len(meant) + 1))
    for inserted, word in enumerate(heard, start=1):
        following = [inserted]
        for other, (diagonal, left) in zip(meant, pairwise(column), strict=True):
            replaced = diagonal + (word != other)
            following.append(min(replaced, left + 1, following[-1] + 1))
        column = following
    return column[-1]


def word_errors(meant: str, heard: str) -> WordErrors:
    """Compare a text with the recognised words."""
    reference = words_of(meant)
    return WordErrors(edit_distance(reference, words_of(heard)), len(reference))


def total(errors: Iterable[WordErrors]) -> WordErrors:
    """Return the sum, every word with the same weight."""
    return sum(errors, WordErrors())


class Recogniser:
    """pocketsphinx with its bundled US-English model, which is deterministic."""

    def __init__(self) -> None:
        from pocketsphinx import Decoder

        self._decoder = Decoder(samprate=RECOGNISER_RATE, loglevel="FATAL")

    def __call__(self, samples: np.ndarray, sample_rate: int) -> str:
        """Recognise words in mono float32 samples."""
        import soxr

        mono = soxr.resample(samples, sample_rate, RECOGNISER_RATE)
        pcm = (np.clip(mono, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""
