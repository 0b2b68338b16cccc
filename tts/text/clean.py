"""Unicode cleaning: reduces typed or pasted text to characters that a model can read.

Compatibility forms, curly quotes and accents become plain; formatting characters are removed; a few
signs with a spoken name (£, °, ×, …) and, for models that read ASCII, emoji are kept for the rules
of `tts.text.english`.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import groupby

from tts.errors import FieldViolation, InvalidRequestError
from tts.text.english.emoji import EMOJI
from tts.text.english.tables import SIGN_WORDS
from tts.text.ipa import CLOSE, OPEN

DASHES = "–—"  # kept for the rules too: ranges and pauses
KEPT = frozenset(SIGN_WORDS) | frozenset(DASHES)
PLAIN = {**{sign: f" {word} " for sign, word in SIGN_WORDS.items()}, "–": "-", "—": "-"}

FRACTIONS = "1/2 1/3 2/3 1/4 3/4 1/5 1/8 3/8 5/8 7/8"
LIGATURES = "ss SS ae AE oe OE th Th ng Ng"
# Compatibility decomposition would join these to the characters before, or misread them.
_BEFORE_TABLE = str.maketrans(
    dict(zip("½⅓⅔¼¾⅕⅛⅜⅝⅞", (f" {f}" for f in FRACTIONS.split()), strict=True))
    | {"²": " squared", "³": " cubed", "№": "No. ", "…": "... ", "⁄": "/"}
    | dict.fromkeys("™®©℠", "")
)
_AFTER_TABLE = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼʻʹ´ˈ‹›", "'")
    | dict.fromkeys("“”„‟«»″〝〞「」『』", '"')
    | dict.fromkeys("‐‑‒−﹣", "-")
    | dict.fromkeys("―⸺⸻", "—")
    | dict.fromkeys("•·‣◦∙●▪→⇒➔⟶", " — ")
    | dict(zip("。、،؟µ", ".,,?μ", strict=True))
    | dict.fromkeys("¿¡" + OPEN + CLOSE, "")  # the last two stand around phonemes
)
_LETTERS_TABLE = str.maketrans(
    dict(zip("ßẞæÆœŒþÞŋŊ", LIGATURES.split(), strict=True))
    | dict(zip("øØłŁđĐðÐıħĦƒə", "oOlLdDdDihHfe", strict=True))
)
_PLAIN_TABLE = str.maketrans(PLAIN)
_DROPPED_CATEGORIES = frozenset({"So", "Sk", "Cf", "Cn", "Co", "Cs", "Mn", "Me", "Cc"})
_SUPERSCRIPTS = re.compile("(?<=[0-9)])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{2,}|(?<=[0-9)])[⁰¹⁴⁵⁶⁷⁸⁹]")
_DEGREES = re.compile("(?<=[0-9])º(?=[CF]?(?![A-Za-z0-9]))")  # an ordinal sign, as it is typed
_NOT_COMPATIBLE = re.compile("([ªº²³¹⁰⁴-⁹½⅓⅔¼¾⅕⅛⅜⅝⅞№°])")
_DROPPED_TABLE = str.maketrans(dict.fromkeys("™®©℠", "") | {"…": "... ", "⁄": "/"})
_EMOJI = re.compile(f"[{EMOJI}]")
_FORBIDDEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")
_MAX_GREEK_LETTERS = 2  # longer runs are Greek words, not formulas


class TextError(InvalidRequestError):
    """Error for text with control characters, or text that does not fit."""

    def __init__(self, description: str, field: str = "text") -> None:
        super().__init__(FieldViolation(field, description))


def check_text(text: str, offset: int = 0, field: str = "text") -> None:
    """Raise `TextError` at the first control character; tabs and line ends are allowed.

    The message names the position in the whole input, in which `text` begins at `offset`; `field`
    is the field path of the input in its request.
    """
    if fault := control_fault(text, offset):
        raise TextError(fault, field)


def control_fault(text: str, offset: int = 0) -> str:
    """Return the message of `check_text`, or "" for a text without control characters."""
    found = _FORBIDDEN.search(text)
    if found is None:
        return ""
    code, position = ord(found.group()), offset + found.start()
    return f"control character U+{code:04X} at position {position}"


def without_controls(text: str) -> str:
    """Return text that `check_text` accepts, of the same length: a space for each control."""
    return _FORBIDDEN.sub(" ", text)


def without_emoji(text: str) -> str:
    """Return text with a space for each emoji."""
    return text if text.isascii() else _EMOJI.sub(" ", text)


def clean_phrase(text: str, *, ascii_only: bool, keep_signs: bool, is_english: bool = True) -> str:
    """Return a phrase whose words are cleaned as those of a text are, without emoji."""
    words = (
        clean_word(word, ascii_only=ascii_only, keep_signs=keep_signs, is_english=is_english)[0]
        for word in without_emoji(text).split()
    )
    return " ".join(filter(None, words))


def clean_word(
    word: str, *, ascii_only: bool, keep_signs: bool, is_english: bool = True
) -> tuple[str, int]:
    """Return a cleaned run of characters without white space, and the number of removed letters.

    The result may contain spaces and may be empty. `ascii_only` reduces letters to ASCII;
    `keep_signs` keeps the characters of `KEPT` for later rules, else they are spelled out here.
    Text of another language than English keeps signs whose names are English.
    """
    if word.isascii():
        return word, 0
    text = _compatible(word) if is_english else _compatible_around(word)
    text = text.translate(_AFTER_TABLE)
    if not keep_signs:
        text = text.translate(_PLAIN_TABLE)
    text = _ascii_letters(text) if ascii_only else text
    is_kept = (lambda c: keep_signs and _is_emoji(c)) if ascii_only else _is_kept
    kept = [c for c in text if c.isascii() or c in KEPT or is_kept(c)]
    lost = sum(c.isalpha() for c in text if not c.isascii() and c not in KEPT) if ascii_only else 0
    return " ".join("".join(kept).split()), lost


def without_others(word: str, letters: frozenset[str]) -> tuple[str, int]:
    """Return a cleaned word without the letters that are neither in `letters` nor become ASCII, and
    how many were removed.
    """
    if word.isascii():
        return word, 0
    parts, num_lost = [], 0
    for is_other, run in groupby(word, lambda c: not c.isascii() and c not in letters):
        part, lost = "".join(run), 0
        if is_other:
            reduced, lost = clean_word(part, ascii_only=True, keep_signs=True)
        parts.append(reduced if lost else part)
        num_lost += lost
    return "".join(parts), num_lost


def _compatible(word: str) -> str:
    """Return a word in compatibility forms, with the names of a few signs in English."""
    word = _DEGREES.sub("°", _SUPERSCRIPTS.sub(_power, word)).translate(_BEFORE_TABLE)
    return unicodedata.normalize("NFKC", word)


def _compatible_around(word: str) -> str:
    """Return a word in compatibility forms, except signs that would become letters or digits."""
    parts = _NOT_COMPATIBLE.split(word.translate(_DROPPED_TABLE))
    return "".join(
        part if _NOT_COMPATIBLE.match(part) else unicodedata.normalize("NFKC", part)
        for part in parts
    )


def _power(match: re.Match[str]) -> str:
    """Return superscript digits as an exponent: "10⁻³" is "10^-3"."""
    return "^" + unicodedata.normalize("NFKC", match.group()).replace("−", "-")


def _is_emoji(character: str) -> bool:
    is_symbol = unicodedata.category(character) == "So"
    return is_symbol and _EMOJI.fullmatch(character) is not None


def _is_kept(character: str) -> bool:
    return unicodedata.category(character) not in _DROPPED_CATEGORIES


def _ascii_letters(text: str) -> str:
    """Return letters without accents, with a few spelled out, and short Greek runs by name."""
    parts = unicodedata.normalize("NFKD", text.translate(_LETTERS_TABLE))
    bare = "".join(c for c in parts if unicodedata.category(c) != "Mn")
    greek = [c for c in bare if c not in KEPT and _greek_name(c)]
    if 0 < len(greek) <= _MAX_GREEK_LETTERS:
        bare = "".join(f" {_greek_name(c)} " if c in greek else c for c in bare)
    return bare


def _greek_name(character: str) -> str:
    if character.isascii():
        return ""
    name = unicodedata.name(character, "")
    is_letter = name.startswith("GREEK") and " LETTER " in name and name.count(" ") == 3
    return name.rsplit(" ", 1)[-1].lower() if is_letter else ""
