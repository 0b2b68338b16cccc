"""What a letter sounds like, one token for each: a phone, two phones, or nothing.

The teacher's rules give every letter one such sound. So the second task's answers have, place by
place, the sound of the text's letter there: `s h o w` is `sh`, silence, `ow1`, silence; between
words stands a break. In files a sound is one printable byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_VOWELS = (
    "aa", "ae", "ah", "ao", "aw", "ax", "ay", "eh", "er", "ey", "ih", "iy", "ow", "oy", "uh", "uw",
)  # fmt: skip
_CONSONANTS = (
    "b", "ch", "d", "dh", "f", "g", "hh", "jh", "k", "l", "m", "n", "ng", "p", "r", "s", "sh", "t",
    "th", "v", "w", "y", "z", "zh",
)  # fmt: skip
PAIRS = (  # those that the rules know of, such as an x's and a u's
    ("w", "ey1"), ("w", "ax0"), ("y", "ax0"), ("t", "s"), ("y", "uw1"), ("y", "uw0"),
    ("ax0", "l"), ("ax0", "m"), ("m", "ae1"), ("m", "ax0"), ("n", "y"), ("w", "ah1"),
    ("y", "er0"), ("y", "uh1"), ("y", "er1"), ("k", "s"), ("g", "zh"), ("k", "sh"), ("g", "z"),
)  # fmt: skip
BREAK = "/"  # between words, as in `training.teacher.phone_text`
PHONES = (*(vowel + stress for vowel in _VOWELS for stress in "01"), *_CONSONANTS)
SOUNDS: tuple[tuple[str, ...], ...] = ((), (BREAK,), *((phone,) for phone in PHONES), *PAIRS)
NUMBER = {sound: i for i, sound in enumerate(SOUNDS)}
SILENT, WORD_BREAK = 0, 1  # their numbers
FIRST_BYTE = ord("!")  # of sound 0 in files
MAX_SOUNDS = 128  # tokens, some of them without a sound: a round number of rows in the model

assert FIRST_BYTE + len(SOUNDS) - 1 <= ord("~")


def sound_bytes(sounds: Sequence[int]) -> bytes:
    """Sounds by their numbers as a file has them."""
    return bytes(FIRST_BYTE + sound for sound in sounds)


def sound_numbers(data: np.ndarray) -> np.ndarray:
    """The reverse, int16 of uint8."""
    return data.astype(np.int16) - FIRST_BYTE


def spelled(sound: int) -> str:
    """What a sound's token adds to an answer: its phones, a space after each."""
    return "".join(f"{phone} " for phone in SOUNDS[sound])
