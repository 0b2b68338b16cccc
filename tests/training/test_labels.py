"""Labels for every 10 ms: letters over the time of their words."""

from __future__ import annotations

from training.labels import Phone, letter_labels, word_times
from tts.speech.aligner import letter_labels as letters_of

SAID = (
    Phone(0, 0.05, 0.10),
    Phone(0, 0.10, 0.20),
    Phone(2, 0.30, 0.345),
    Phone(2, 0.345, 0.40),
)
WORDS = ("ha", "", "lo")


def test_a_words_letters_are_spread_over_its_time() -> None:
    labels = letter_labels(WORDS, SAID, 50).tolist()
    h, a = letters_of("ha")
    el, o = letters_of("lo")
    assert labels[5:20] == [h] * 8 + [a] * 7
    assert labels[30:40] == [el] * 5 + [o] * 5
    assert set(labels[:5] + labels[20:30] + labels[40:]) == {0}
    assert word_times(WORDS, SAID) == [("ha", 0.05, 0.20), ("lo", 0.30, 0.40)]


def test_labels_end_where_the_samples_end() -> None:
    el, o = letters_of("lo")
    assert letter_labels(WORDS, SAID, 35).tolist()[30:] == [el] * 3 + [o] * 2
