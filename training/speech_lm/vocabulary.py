"""Token ids of the natural voice's language model: bytes, control, the teacher's symbols, codes.

Bytes, control tokens and the first code have the places of `training.vocabulary`. Voice tokens have
the codes' ids.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from training.vocabulary import (
    FIRST_CODE,
    FIRST_SOUND,
    FIRST_VOICE,
)

SPELLED = FIRST_VOICE  # in a text: symbols of the teacher follow, until the next byte
BRITISH = FIRST_VOICE + 1  # after PHONEMES: as a British speaker says it
FIRST_SYMBOL = FIRST_SOUND
MAX_SYMBOLS = FIRST_CODE - FIRST_SYMBOL


class Symbols:
    """The teacher's symbols by their places in the vocabulary, counted from FIRST_SYMBOL.

    Raises ValueError for more than the vocabulary has room for.
    """

    def __init__(self, known: Mapping[str, int]) -> None:
        self.all = sorted(known, key=lambda symbol: known[symbol])
        if len(self.all) > MAX_SYMBOLS:
            raise ValueError(f"{len(self.all)} symbols, room for {MAX_SYMBOLS}")
        self._place = {symbol: place for place, symbol in enumerate(self.all)}
        self.space = self._place[" "]

    def places(self, phonemes: str) -> bytes:
        """One byte for each symbol that is known."""
        return bytes(self._place[symbol] for symbol in phonemes if symbol in self._place)

    def read(self, tokens: np.ndarray) -> str:
        """Symbols of tokens."""
        return "".join(self.all[token - FIRST_SYMBOL] for token in tokens.tolist())
