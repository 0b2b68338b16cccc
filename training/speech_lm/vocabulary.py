"""Token ids of the natural voice's language model: bytes, control, the teacher's symbols, codes.

Bytes, control tokens and the first code have the places of `training.vocabulary`. Voice tokens have
the codes' ids. A Spanish text stands behind a marker: its letters are those of an English one, but
for a few that are two bytes (UTF-8), and a voice may speak both languages.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from training.vocabulary import (
    CONTROL_TOKENS,
    FIRST_CODE,
    FIRST_SOUND,
    FIRST_VOICE,
    PAD,
    byte_alphabet,
)

SPELLED = FIRST_VOICE  # in a text: symbols of the teacher follow, until the next byte
BRITISH = FIRST_VOICE + 1  # after PHONEMES: as a British speaker says it
SPANISH = FIRST_VOICE + 2  # a Spanish text follows
FIRST_SYMBOL = FIRST_SOUND
MAX_SYMBOLS = FIRST_CODE - FIRST_SYMBOL
SPELLED_NAME, BRITISH_NAME, SPANISH_NAME = "<|symbols|>", "<|british|>", "<|spanish|>"
BYTES = byte_alphabet()
USED = frozenset('AIOQTWYabdfhijklmnpstuvwzæðŋɐɑɒɔəɛɜɡɪɹʃʊʌʒʤʧθᵊᵻˈˌː .,;:!?—…“”"()')
SPANISH_USED = frozenset("eorxɣɲɾʎʝβ")
"""Symbols that Spanish uses and English does not."""
IPA = {
    "A": "eɪ", "I": "aɪ", "O": "oʊ", "Q": "əʊ", "T": "ɾ", "W": "aʊ", "Y": "ɔɪ", "ʤ": "dʒ",
    "ʧ": "tʃ",
}  # fmt: skip
"""Phonemes of misaki's symbols; those that are not here stand for themselves."""


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

    def phonemes(self, *, spanish: bool = False) -> list[str]:
        """For each symbol the phonemes that it stands for, "" where English does not use it, nor
        Spanish with `spanish`."""
        used = USED | SPANISH_USED if spanish else USED
        return [IPA.get(symbol, symbol) if symbol in used else "" for symbol in self.all]


def build_tokenizer(symbols: Symbols, *, spanish: bool = False) -> Tokenizer:
    """A tokenizer of bytes, control tokens and symbols; codes have no names.

    Symbols are only decoded, as their phonemes and a space, words apart by a slash: without merges
    no text is encoded as one.
    """
    names = list(CONTROL_TOKENS)
    names[SPELLED - PAD], names[BRITISH - PAD] = SPELLED_NAME, BRITISH_NAME
    if spanish:
        names[SPANISH - PAD] = SPANISH_NAME
    spoken = [phoneme.replace(" ", "/") for phoneme in symbols.phonemes(spanish=spanish)]
    silent = [f"<|silent_{place}|>" for place, phoneme in enumerate(spoken) if not phoneme]
    spelled_out = iter(silent)
    texts = [
        "".join(BYTES[byte] for byte in f"{phoneme} ".encode()) if phoneme else next(spelled_out)
        for phoneme in spoken
    ]
    vocabulary = {name: number for number, name in enumerate((*BYTES, *names))}
    vocabulary |= {text: FIRST_SYMBOL + place for place, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in (*names, *silent)]
    )
    return tokenizer
