"""Sounds of letters, one token for each: a phone, two phones, or nothing.

The teacher's rules assign one such sound to every letter. The answers of the second task therefore
have, letter by letter, the sound of the text: `s h o w` is `sh`, silence, `ow1`, silence; a break
separates words. In files a sound is one printable byte.
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
PAIRS = (  # pairs of the rules, such as those of an x and a u
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
MAX_SOUNDS = 128  # tokens, some of them unused: a round number of rows in the model

assert FIRST_BYTE + len(SOUNDS) - 1 <= ord("~")


def sound_bytes(sounds: Sequence[int]) -> bytes:
    """Return sounds, given by number, in file format."""
    return bytes(FIRST_BYTE + sound for sound in sounds)


def sound_numbers(data: np.ndarray) -> np.ndarray:
    """Return int16 numbers of uint8 sounds."""
    return data.astype(np.int16) - FIRST_BYTE


def spelled(sound: int) -> str:
    """Return the output text of a sound's token: its phones, a space after each."""
    return "".join(f"{phone} " for phone in SOUNDS[sound])
