"""The teacher's lexicon, and its letter-to-sound rules for many words at once.

flite has a decision tree for every letter, over the four letters before it and the four after it; a
leaf is a phone, two phones, or none. `Rules.sounds` walks the trees of all words together, much
faster than `Teacher.pronounce`, with the same result for words that follow these rules alone. The
tables are read from flite's own library (sources: flite's public headers).
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from training.sounds import NUMBER, sound_bytes
from training.strings import Strings, flat_index

WINDOW = 4  # letters on either side
MIN_LETTERS = 5  # minimum length of words that are not abbreviations
LEAF = 255
NO_PHONE = "epsilon"
OUTSIDE, BORDER = ord("0"), ord("#")
NODE = np.dtype([("feature", "u1"), ("value", "u1"), ("same", "<u2"), ("other", "<u2")])
PRIME, BITS_61 = 1_000_003, 2**61 - 1  # for hashes of paths
LETTERS = range(ord("a"), ord("z") + 1)


class Rules:
    """The tables of flite's American lexicon."""

    def __init__(self, folder: str = "") -> None:
        name = "libflite_cmulex.so.1"
        self._library = ctypes.CDLL(os.path.join(folder, name) if folder else name)
        start = self._address("cmu_lts_letter_index")
        size = start - self._address("cmu_lts_model")
        size -= size % NODE.itemsize
        self._nodes = np.frombuffer(self._bytes("cmu_lts_model", size), NODE)
        self._roots = np.frombuffer(self._bytes("cmu_lts_letter_index", 2 * len(LETTERS)), "<u2")
        leaves = self._nodes["feature"] == LEAF
        names = (ctypes.c_char_p * (int(self._nodes["value"][leaves].max()) + 1)).in_dll(
            self._library, "cmu_lts_phone_table"
        )
        self._sounds = np.frombuffer(sound_bytes([_sound(name) for name in names]), np.uint8)
        language = "libflite_usenglish.so.1"
        speller = ctypes.CDLL(os.path.join(folder, language) if folder else language).us_aswd
        speller.restype, speller.argtypes = ctypes.c_int, [ctypes.c_char_p]
        self._is_sayable = speller

    def _address(self, name: str) -> int:
        return ctypes.addressof(ctypes.c_char.in_dll(self._library, name))

    def _bytes(self, name: str, size: int) -> bytes:
        return bytes((ctypes.c_ubyte * size).in_dll(self._library, name))

    def lexicon(self) -> list[str]:
        """Return every word of the lexicon, sorted: exceptions from the letter-to-sound rules."""
        size = ctypes.c_int.in_dll(self._library, "cmu_lex_num_bytes").value
        pieces = (ctypes.c_char_p * 256).in_dll(self._library, "cmu_lex_entries_huff_table")
        count = ctypes.c_int.in_dll(self._library, "cmu_lex_num_entries").value
        # An entry consists of its part of speech and its letters, packed, a zero, its phones,
        # packed, 255.
        entries = self._bytes("cmu_lex_data", size).split(b"\xff")[1 : count + 1]
        packed = (entry.partition(b"\0")[0] for entry in entries)
        words = {b"".join(pieces[piece] or b"" for piece in entry)[1:] for entry in packed}
        return sorted(word.decode("ascii") for word in words if word)

    def apply(self, word: bytes) -> bool:
        """Whether a word of lower-case letters that is not in the lexicon follows these rules.

        flite spells words that it cannot pronounce ("ctenoid"), and has a few abbreviations.
        """
        return len(word) >= MIN_LETTERS and bool(self._is_sayable(word))

    def sounds(self, words: Strings) -> Strings:
        """Return the sound of every letter of words of lower-case letters, in file format."""
        leaves, _ = self._walk(*_padded(words))
        return Strings.of(
            self._sounds[leaves], np.cumsum(words.length) - words.length, words.length
        )

    def paths(self, words: Strings) -> np.ndarray:
        """Return for every letter of all words the path through its tree, as a hash of 61 bits."""
        return self._walk(*_padded(words))[1]

    def _walk(self, text: np.ndarray, letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the leaf's number, and the path, of the letter at each index of `letters`."""
        node = self._roots[text[letters] - LETTERS[0]].astype(np.int64)
        path, active = node.copy(), np.arange(len(letters))
        features, values = self._nodes["feature"], self._nodes["value"]
        same, other = self._nodes["same"], self._nodes["other"]
        offsets = np.array([*range(-WINDOW, 0), *range(1, WINDOW + 1)])
        while len(active := active[features[node[active]] != LEAF]):
            at = node[active]
            is_same = text[letters[active] + offsets[features[at]]] == values[at]
            node[active] = np.where(is_same, same[at], other[at])
            path[active] = (path[active] * PRIME + 2 * at + is_same) % BITS_61
        return values[node], path


def _padded(words: Strings) -> tuple[np.ndarray, np.ndarray]:
    """Return all words with their context as one array, and the indices of their letters in it."""
    rows = words.length + 2 * WINDOW
    text = np.full(int(rows.sum()), OUTSIDE, np.uint8)
    start = np.cumsum(rows) - rows + WINDOW
    letters = flat_index(start, words.length)
    text[letters] = words.bytes[flat_index(words.start, words.length)]
    text[start - 1] = text[start + words.length] = BORDER
    return text, letters


def _sound(name: bytes) -> int:
    """Return the number of a leaf's sound."""
    phones = name.decode("ascii")
    return NUMBER[() if phones == NO_PHONE else tuple(phones.split("-"))]
