"""The evaluation of word times, with an aligner that reads one letter from each code."""

from __future__ import annotations

import numpy as np
import pytest

from training.labels import TimedWord
from training.timings import Line, evaluate
from tts.speech.aligner import LETTERS, NUM_LABELS, Aligner, AlignerConfig

SPOKEN = "__hheelloo___woorlldd__"
RATE = 25.0


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    """An aligner that assigns label c to code c with high probability."""
    config = AlignerConfig(codebook_size=NUM_LABELS, frames_per_code=2, table_width=NUM_LABELS,
                           width=NUM_LABELS, layers=1, kernel=1)  # fmt: skip
    identity = np.eye(NUM_LABELS, dtype=np.float32)
    weights = {
        "table.weight": 20 * identity,
        "layers.0.weight": identity[:, :, None],
        "layers.0.bias": np.zeros(NUM_LABELS, np.float32),
        "output.weight": np.concatenate([identity, identity]),
        "output.bias": np.zeros(2 * NUM_LABELS, np.float32),
    }
    return Aligner(config, weights)


def line(*words: tuple[str, int, int], spoken: str = SPOKEN) -> Line:
    """Return a spoken line with words whose starts and ends are given in codes."""
    codes = tuple(0 if c == "_" else 1 + LETTERS.index(c) for c in spoken)
    return Line(
        codes, tuple(TimedWord(word, start / RATE, end / RATE) for word, start, end in words)
    )


def test_errors_are_of_starts_and_ends_in_milliseconds(aligner: Aligner) -> None:
    right = line(("hello", 2, 10), ("world", 13, 21))
    late = line(("hello", 3, 10), ("world", 13, 22))
    found = {figure.name: figure for figure in evaluate(aligner, [right, late], RATE).figures}
    errors = found["start and end of a word"].values
    assert errors == pytest.approx((0, 0, 0, 0, 40, 0, 0, 40))
    assert found["words without times"].value == 0
    assert found["work"].value > 0


def test_words_that_are_not_found_are_counted(aligner: Aligner) -> None:
    cut = line(("hello", 0, 3), ("world", 3, 3), spoken="hel")
    found = {figure.name: figure for figure in evaluate(aligner, [cut], RATE).figures}
    assert found["words without times"].value == 1
