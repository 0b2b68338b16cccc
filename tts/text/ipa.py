"""Phonemes of the International Phonetic Alphabet inside a text.

They stand between marks that no cleaned text of an `ascii_only` model has, each word by itself:

    "I say ⟨təmˈɑtoʊ⟩, you say ⟨təmˈeɪtoʊ⟩."
"""

from __future__ import annotations

import re
from collections.abc import Iterator

OPEN, CLOSE = "⟨", "⟩"
_WORDS = re.compile(rf"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")


def marked(ipa: str) -> str:
    """Return the words of a pronunciation, each between marks."""
    return " ".join(f"{OPEN}{word}{CLOSE}" for word in ipa.split())


def parts_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield (letters, phonemes) pairs in order; the last pair has no phonemes."""
    done = 0
    for match in _WORDS.finditer(text):
        yield text[done : match.start()], match[1]
        done = match.end()
    yield text[done:], ""
