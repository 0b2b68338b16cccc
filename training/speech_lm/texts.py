"""The tables of `training.kokoro.phonemes`, all accents', as tokens.

A word `_` of a text has no letters: it is given in symbols wherever the text is asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from training.kokoro.made_up import NO_LETTERS
from training.kokoro.phonemes import ACCENTS, SPANISH, accents_in, read_table, table
from training.speech_lm.vocabulary import Symbols
from training.strings import Strings

HELD_OUT_LINE = 400  # one line in so many is never trained on
QUOTES = str.maketrans("\u201c\u201d\u00ab\u00bb\u2018\u2019\u2014\u2013", '""""\'\'--')
SPANISH_LETTERS = frozenset("áéíóúüñÁÉÍÓÚÜÑ")
EDGES = b'.,!?;:"()-'


def written(text: str, letters: Collection[str] = ()) -> bytes:
    """A text as the service passes it on: ASCII, and the other `letters` of its language."""
    plain = text.translate(QUOTES)
    return "".join(sign for sign in plain if sign.isascii() or sign in letters).encode()


class Texts:
    """Rows of all accents, one after the other: row `first[accent] + number`."""

    def __init__(self, accents: Sequence[Sequence[str]], symbols: Symbols) -> None:
        """`accents`: for each its rows of phonemes, a tab and the text."""
        self.symbols = symbols
        rows = [row.split("\t") for table_ in accents for row in table_]
        sizes = [len(table_) for table_ in accents]
        self.first = np.cumsum([0, *sizes[:-1]])
        self.accent = np.repeat(np.arange(len(sizes)), sizes)
        self.spanish = self.accent == ACCENTS.index(SPANISH)
        texts = [
            written(text, SPANISH_LETTERS if spanish else ())
            for (_, text), spanish in zip(rows, self.spanish.tolist(), strict=True)
        ]
        spelled = [symbols.places(phonemes) for phonemes, _ in rows]
        self.text, self.spelled = Strings(texts), Strings(spelled)
        self.held_out = np.array([zlib.crc32(text) % HELD_OUT_LINE == 0 for text in texts])
        self.asks = np.array([text.rstrip(b'"').endswith(b"?") for text in texts])
        self.unwritten = np.array([NO_LETTERS.encode() in text for text in texts])
        space = bytes((symbols.space,))
        pairs = zip(texts, spelled, strict=True)
        self.aligned = np.array([a.count(b" ") == b.count(space) for a, b in pairs])
        self._edges = symbols.places('.,!?;:…—“”"()')

    @classmethod
    def load(cls, folder: Path, symbols: Symbols) -> Texts:
        """Read the tables of both English accents, and that of Spanish if it is there."""
        tables = [read_table(table(folder, accent)) for accent in accents_in(folder)]
        return cls(tables, symbols)

    def words(self, row: int) -> list[tuple[bytes, bytes]]:
        """Words and their symbols; one pair of all where they do not stand side by side."""
        text, spelled = self.text[row].tobytes(), self.spelled[row].tobytes()
        if not self.aligned[row]:
            return [(text, spelled)]
        space = bytes((self.symbols.space,))
        return list(zip(text.split(b" "), spelled.split(space), strict=True))

    def bare(self, pair: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """A word and its symbols without punctuation."""
        return pair[0].strip(EDGES), pair[1].strip(self._edges)

    def around(self, word: bytes) -> tuple[bytes, bytes]:
        """The punctuation before a word and after it."""
        rest = word.lstrip(EDGES)
        return word[: len(word) - len(rest)], rest[len(rest.rstrip(EDGES)) :]
