"""The evaluation of word times, with an aligner that reads one letter from each code."""

from __future__ import annotations

import pytest

from tests.tts.speech.test_aligner import codes_of, spelled
from training.labels import TimedWord
from training.timings import Line, evaluate
from tts.speech.aligner import Aligner

SPOKEN = "__hheelloo___woorlldd__"
RATE = 25.0


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    return spelled()


def line(*words: tuple[str, int, int], spoken: str = SPOKEN) -> Line:
    """Return a spoken line with words whose starts and ends are given in codes."""
    times = (TimedWord(word, start / RATE, end / RATE) for word, start, end in words)
    return Line(codes_of(spoken), tuple(times))


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
