"""Phonemes of the International Phonetic Alphabet as symbols of a model."""

from __future__ import annotations

import pytest

from tts.families.ipa import SymbolTable

PHONEMES = ["", "oʊ", "ə", "h", "l", "ˈ", "ˌ", "ɹ", "ɜ", "d", "w", "t", "ɡ", "ə", "ɛ", "tʃ"]
TABLE = SymbolTable(PHONEMES)


def spelled(ipa: str) -> list[str]:
    return [PHONEMES[place] for place in TABLE.places(ipa)]


@pytest.mark.parametrize(
    ("ipa", "wanted"),
    [
        ("həlˈoʊ", ["h", "ə", "l", "ˈ", "oʊ"]),
        ("/həˈloʊ/", ["h", "ə", "l", "ˈ", "oʊ"]),  # stress in front of the syllable
        ("wˈɝld", ["w", "ˈ", "ɜ", "ɹ", "l", "d"]),  # two symbols stand for one sign
        ("t͡ʃet", ["tʃ", "ɛ", "t"]),
        ("go", ["ɡ", "oʊ"]),
        ("ˌtəˈlo", ["t", "ˌ", "ə", "l", "ˈ", "oʊ"]),
        ("", []),
    ],
)
def test_phonemes_are_found_longest_first(ipa: str, wanted: list[str]) -> None:
    assert spelled(ipa) == wanted


def test_the_first_of_equal_symbols_counts() -> None:
    assert TABLE.places("ə") == [2]


@pytest.mark.parametrize("ipa", ["ǁ", "ʌ", "hə!", "日", "ɚʍz"])
def test_other_signs_are_errors(ipa: str) -> None:
    with pytest.raises(ValueError, match="stands for no phoneme"):
        TABLE.places(ipa)
