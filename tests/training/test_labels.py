"""Times of words by their symbols' durations, and letters over the time of their words."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.speech_lm.tokens import KNOWN
from training.labels import SYMBOL_FRAME_S, TimedWord, letter_labels, word_times
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import Symbols
from tts.speech.aligner import letter_labels as letters_of


def times(phonemes: str, text: str) -> list[tuple[str, int, int]]:
    """Return words with times in the teacher's frames, where symbol n has n + 1 of them."""
    texts = Texts([[f"{phonemes}\t{text}"]], Symbols(KNOWN))
    durations = np.arange(1, len(phonemes) + 3, dtype=np.uint8)
    found = word_times(texts, 0, durations)
    return [
        (word, round(start / SYMBOL_FRAME_S), round(end / SYMBOL_FRAME_S))
        for word, start, end in found
    ]


def test_a_word_lasts_from_its_first_sound_to_its_last() -> None:
    assert times("bˈad ig", "bad egg") == [("bad", 1, 15), ("egg", 21, 36)]


def test_punctuation_is_not_part_of_a_word() -> None:
    # 0 “ b a , ” space g . 0, of 1 to 10 frames
    assert times("“ba,” g.", "“Bah,” go.") == [('"Bah,"', 3, 10), ("go.", 28, 36)]
    assert times("ba . g", "bah - go") == [("bah", 1, 6), ("go", 21, 28)]


def test_letters_with_an_accent_are_letters() -> None:
    texts = Texts([[], [], ["bˈo ˈi eg\t¿Bó é ig?"]], Symbols(KNOWN))
    found = word_times(texts, 0, np.ones(11, np.uint8))
    assert [word.text for word in found] == ["Bó", "é", "ig?"]
    assert letters_of("é") == letters_of("e")


@pytest.mark.parametrize(
    ("phonemes", "text"),
    [
        ("fa ib", "45"),
        ("fa", "4"),
        ("fa ib, bi", "4,5 bee"),
        ("bi", "&"),
        (". bi", "a - "),
    ],
)
def test_words_that_are_not_those_of_the_text_have_no_times(phonemes: str, text: str) -> None:
    assert times(phonemes, text) == []


def test_a_words_letters_are_spread_over_its_time() -> None:
    said = (TimedWord("ha", 0.05, 0.20), TimedWord("Lo!", 0.30, 0.40))
    labels = letter_labels(said, 50, 100.0).tolist()
    h, a = letters_of("ha")
    el, o = letters_of("lo")
    assert labels[5:20] == [h] * 8 + [a] * 7
    assert labels[30:40] == [el] * 5 + [o] * 5
    assert set(labels[:5] + labels[20:30] + labels[40:]) == {0}


def test_labels_end_where_the_codes_end() -> None:
    el, o = letters_of("lo")
    said = (TimedWord("lo", 0.30, 0.40), TimedWord("ha", 0.40, 0.60))
    assert letter_labels(said, 35, 100.0).tolist()[30:] == [el] * 3 + [o] * 2
