"""Phonemes of the International Phonetic Alphabet as symbols of a model."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

STRESS, LONG = "ˈˌ", "ː"
VOWELS = "aeiouyæøœɐɑɒɔɘəɚɛɜɝɞɤɨɪɯɵɶʉʊʌʏᵊᵻ"
_STRESS = re.compile(rf"([{STRESS}])([^{VOWELS}{STRESS}\s]+)(?=[{VOWELS}])")
_SPELLINGS = {
    "r": "ɹ", "g": "ɡ", "ɝ": "ɜɹ", "ɚ": "əɹ", "ɫ": "l", "ʍ": "w", "ɐ": "ʌ", "e": "ɛ", "o": "oʊ",
    "'": "ˈ", ",": "ˌ", ":": LONG, "ʔ": "t", "x": "h", "β": "v", "ɣ": "ɡ", "ɲ": "nj", "ʎ": "lj",
    "ʝ": "j", "ɾ": "ɹ",
}  # fmt: skip
"""Signs that a model may lack, by the nearest phonemes."""
_SILENT = str.maketrans("", "", "/[].\u035c\u0361\u203f")  # brackets, syllables, ties


class SymbolTable:
    """Symbols of a model by the phonemes, one or two letters, that each stands for."""

    def __init__(self, phonemes: Sequence[str]) -> None:
        """`phonemes`: those of each symbol, "" for one that is not used; the first of two equal
        ones counts.
        """
        self._places: dict[str, int] = {}
        for place, phoneme in enumerate(phonemes):
            self._places.setdefault(phoneme, place)
        self._places.pop("", None)
        longest_first = sorted(self._places, key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)

    def places(self, ipa: str) -> list[int]:
        """Return the number of each symbol of a word. Raises ValueError that names
        a sign that stands for no symbol.

        A mark of stress stands in front of its syllable, as is usual, or of its vowel, as models
        are trained.
        """
        text = unicodedata.normalize("NFD", ipa).translate(_SILENT)
        text = _STRESS.sub(r"\2\1", text)
        found = []
        for piece in self._pieces.findall(text):
            place = self._places.get(piece)
            found += self._near(piece) if place is None else [place]
        return found

    def _near(self, sign: str) -> list[int]:
        """Return the symbols of the phonemes nearest to a sign that is no symbol's."""
        spelling = _SPELLINGS.get(sign)
        if spelling is not None:
            phonemes = [spelling] if spelling in self._places else list(spelling)
            if all(phoneme in self._places for phoneme in phonemes):
                return [self._places[phoneme] for phoneme in phonemes]
        raise ValueError(f"'{sign}' stands for no phoneme of this model")
