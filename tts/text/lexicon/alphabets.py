"""Phonetic alphabets: ARPAbet as IPA, and IPA as the nearest English respelling, by tables."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

_VOWEL_PHONES: Mapping[str, str] = {
    "AA": "ɑ", "AE": "æ", "AH": "ʌ", "AO": "ɔ", "AW": "aʊ", "AX": "ə", "AXR": "əɹ", "AY": "aɪ",
    "EH": "ɛ", "ER": "ɜɹ", "EY": "eɪ", "IH": "ɪ", "IX": "ɪ", "IY": "i", "OW": "oʊ", "OY": "ɔɪ",
    "UH": "ʊ", "UW": "u", "UX": "u",
}  # fmt: skip
_OTHER_PHONES: Mapping[str, str] = {
    "B": "b", "CH": "tʃ", "D": "d", "DH": "ð", "DX": "ɾ", "EL": "əl", "EM": "əm", "EN": "ən",
    "F": "f", "G": "ɡ", "HH": "h", "JH": "dʒ", "K": "k", "L": "l", "M": "m", "N": "n", "NG": "ŋ",
    "P": "p", "Q": "ʔ", "R": "ɹ", "S": "s", "SH": "ʃ", "T": "t", "TH": "θ", "V": "v", "W": "w",
    "WH": "w", "Y": "j", "Z": "z", "ZH": "ʒ",
}  # fmt: skip
_STRESSED = {
    phone + digit: mark + ipa
    for phone, ipa in _VOWEL_PHONES.items()
    for digit, mark in (("0", ""), ("1", "ˈ"), ("2", "ˌ"))
} | {"AH0": "ə", "ER0": "əɹ"}
ARPABET: Mapping[str, str] = {**_VOWEL_PHONES, **_OTHER_PHONES, **_STRESSED}
"""Phones of ARPAbet in IPA; vowels with and without the digit of their stress."""

_MARKS = "ˈˌ'.ː:ˑ‿͜͡-| "
"""Stress, length, syllables and ties, which a respelling does not show."""
_DIACRITICS = frozenset("ʰʷʲˠˤⁿˡ˞ʼ") | frozenset(map(chr, range(0x300, 0x370)))
_VOWELS: Mapping[str, str] = {
    "aɪɹ": "ire", "aɪəɹ": "ire", "aʊɹ": "our", "aʊəɹ": "our", "ɪɹ": "eer", "iɹ": "eer",
    "ɪə": "eer", "ɛɹ": "air", "ɛə": "air", "eɹ": "air", "ɑɹ": "ar", "ɔɹ": "or", "oɹ": "or",
    "ʊɹ": "oor", "uɹ": "oor", "ʊə": "oor", "ɜɹ": "er", "əɹ": "er", "ɚ": "er", "ɝ": "er",
    "ɜ": "er", "eɪ": "ay", "aɪ": "igh", "ɔɪ": "oy", "oɪ": "oy", "aʊ": "ow", "oʊ": "oh",
    "əʊ": "oh", "i": "ee", "ɪ": "i", "ɨ": "i", "ᵻ": "i", "y": "oo", "ʏ": "oo", "e": "ay",
    "ɛ": "e", "æ": "a", "a": "ah", "ɑ": "ah", "ɒ": "o", "ɔ": "aw", "o": "oh", "ʊ": "oo",
    "u": "oo", "ʌ": "uh", "ə": "uh", "ɐ": "uh", "ᵊ": "uh", "ɵ": "uh", "ɘ": "uh", "ɤ": "uh",
    "ɯ": "oo", "ʉ": "oo", "ø": "er", "œ": "er", "ɞ": "er", "ɶ": "er",
}  # fmt: skip
"""Vowels, also with an r, and their spellings."""
_CONSONANTS: Mapping[str, str] = {
    "tʃ": "ch", "dʒ": "j", "ks": "x", "ŋɡ": "ng", "b": "b", "d": "d", "f": "f", "ɡ": "g",
    "g": "g", "h": "h", "j": "y", "k": "k", "l": "l", "ɫ": "l", "m": "m", "n": "n", "ŋ": "ng",
    "p": "p", "ɹ": "r", "r": "r", "s": "s", "ʃ": "sh", "t": "t", "ɾ": "d", "θ": "th", "ð": "th",
    "v": "v", "w": "w", "ʍ": "wh", "z": "z", "ʒ": "zh", "x": "kh", "χ": "kh", "ç": "sh", "c": "k",
    "q": "k", "ɣ": "g", "β": "v", "ɸ": "f", "ɬ": "l", "ʎ": "ly", "ɲ": "ny", "ʁ": "r", "ʀ": "r",
    "ɻ": "r", "ɽ": "r", "ʂ": "sh", "ʐ": "zh", "ɕ": "sh", "ʑ": "zh", "ʈ": "t", "ɖ": "d", "ɳ": "n",
    "ɭ": "l", "ɟ": "j", "ɦ": "h", "ħ": "h", "ɥ": "w", "ʔ": "", "ʕ": "", "ʋ": "v", "ɱ": "m",
    "ɰ": "w", "ʝ": "y", "ɴ": "n", "ɢ": "g", "ɮ": "l", "ʙ": "b",
}  # fmt: skip
"""Consonants and their spellings."""
_SPELLINGS = {**_VOWELS, **_CONSONANTS}
_LONGEST = max(map(len, _SPELLINGS))
_ONLY_AFTER_VOWELS = ("ks", "ŋɡ")  # no English word begins with them
_NASAL = "\u0303"
_SOFT = "eiy"  # in front of these letters g is read as j
_SHORT = "æɛɪɒ"
_DOUBLED = {"k": "ck"} | {letter: 2 * letter for letter in "bdflmnpstz"}
"""After a short vowel, which would be a long one in front of a single letter."""


def bare_ipa(text: str) -> str:
    """Return phonemes without the brackets around them, with single spaces between words."""
    return " ".join(text.strip().strip("/[]").split())


def is_arpabet(text: str) -> bool:
    """Return whether all words of a text are phones of ARPAbet, one with a stress or in braces."""
    phones = _phones(text)
    is_marked = "{@" in text or not _STRESSED.keys().isdisjoint(phones)
    return is_marked and all(phone in ARPABET for phone in phones)


def arpabet_to_ipa(text: str) -> str:
    """Return phones of ARPAbet in IPA, with the stress in front of its vowel.

    Raises ValueError that names a phone that does not exist.
    """
    phones = _phones(text)
    for phone in phones:
        if phone not in ARPABET:
            raise ValueError(f"'{phone[:20]}' is no phone of ARPAbet")
    return "".join([ARPABET[phone] for phone in phones])


def _phones(text: str) -> list[str]:
    """Return the phones of "K AE1 T", or of "{@K}{@AE1}{@T}" as Riva's clients write them."""
    return text.replace("{@", " ").replace("}", " ").split() if "{@" in text else text.split()


def respelled(ipa: str) -> str:
    """Return phonemes as the nearest English respelling: "təˈmeɪtoʊ" is "tuhmaytoh".

    Stress, length and tones are lost. Raises ValueError that names a sign that is not in the table.
    """
    said = " ".join(filter(None, map(_respelled_word, ipa.split())))
    if not said:
        raise ValueError("the pronunciation has no sound")
    return said


def check_signs(ipa: str) -> None:
    """Raise ValueError that names a sign that is none of the International Phonetic Alphabet."""
    respelled(ipa)


def _respelled_word(ipa: str) -> str:
    text = _without_marks(ipa)
    parts: list[tuple[str, str]] = []  # phonemes and their spelling
    at = 0
    while at < len(text):
        if text[at] == _NASAL:
            parts.append(("n", "n"))
            at += 1
            continue
        size = _size_at(text, at)
        phonemes = text[at : at + size]
        if phonemes in _ONLY_AFTER_VOWELS and not (parts and parts[-1][0] in _VOWELS):
            phonemes = phonemes[0]
        parts.append((phonemes, _SPELLINGS[phonemes]))
        at += len(phonemes)
    return _joined(parts)


def _without_marks(ipa: str) -> str:
    """Return letters and nasal marks. Raises ValueError for other signs."""
    kept = []
    for sign in unicodedata.normalize("NFD", ipa).replace("c\u0327", "ç"):
        if sign in _SPELLINGS or sign == _NASAL:
            kept.append(sign)
        elif sign not in _MARKS and sign not in _DIACRITICS:
            raise ValueError(f"'{sign}' is no sign of the International Phonetic Alphabet")
    return "".join(kept)


def _size_at(text: str, at: int) -> int:
    """Return the length of the longest phonemes of the table at a position."""
    sizes = range(min(_LONGEST, len(text) - at), 0, -1)
    return next(size for size in sizes if text[at : at + size] in _SPELLINGS)


def _joined(parts: list[tuple[str, str]]) -> str:
    """Return the spellings of a word as English writes them next to each other."""
    said = ""
    for index, (phonemes, spelling) in enumerate(parts):
        before = parts[index - 1][0] if index else ""
        after, letters = parts[index + 1] if index + 1 < len(parts) else ("", "")
        if phonemes in _VOWELS:
            is_open = before in _VOWELS and not said.endswith("r")
            said += "-" if is_open else ""  # "kay-os"
            said += "eye" if phonemes == "aɪ" and not said else spelling
        elif spelling == "g" and letters[:1] in _SOFT and letters:
            said += "gh"
        elif spelling == "s" and before in _VOWELS and not after:
            said += "ss"  # not that of "days"
        elif before and before in _SHORT and after in _VOWELS:
            said += _DOUBLED.get(spelling, spelling)
        else:
            said += spelling
    return said
