"""Readings of SSML's `say-as` as English words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tts.text.english.numbers import (
    MAX_NAMED_DIGITS,
    NUMBER,
    cardinal,
    date,
    digits,
    fraction,
    number,
    ordinal,
    year,
)
from tts.text.english.tables import ADDRESS_SIGNS, DIGITS, MONTHS
from tts.text.languages.reader import Reader
from tts.text.languages.registry import is_english, reader_of
from tts.text.normalize import AlignedText, speak_words

BEEP = "beep"
_NUMBER = re.compile(rf"([+-]?)({NUMBER}|\.\d+)")
_WHOLE = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+)(?:st|nd|rd|th)?")
_FRACTION = re.compile(r"(?:(\d+)(?:\s*\+\s*|\s+))?(\d{1,3})/(\d{1,3})")
_MINUTES = re.compile(r"""(\d{1,4})'(?:(\d{1,2})(?:"|''))?""")
_CLOCK = re.compile(r"\d{1,2}(?::\d\d){0,2}\s*(?:[ap]\.?m\.?)?", re.I)
_MONEY = re.compile(r"[$£€¥₹]|\b(?:USD|GBP|EUR|INR|JPY)\b")
_DATE_PARTS = {"y": r"(?P<y>\d{4})", "m": r"(?P<m>\d{1,2})", "d": r"(?P<d>\d{1,2})"}
DATE_FORMATS = ("mdy", "dmy", "ymd", "ydm", "md", "dm", "ym", "my", "y", "m", "d")


def say_as(kind: str, text: str, layout: str = "") -> str:
    """Return a text as words; `kind` is `interpret-as`, `layout` the attribute `format`.

    Raises ValueError for an unknown kind, and for a text that it cannot read.
    """
    if kind not in KINDS:
        raise ValueError(f"interpret-as must be one of {', '.join(KINDS)}")
    words = KINDS[kind](" ".join(text.split()), layout)
    if not words:
        raise ValueError(f"its text cannot be read as {kind}")
    return words


def say_as_in(language: str, kind: str, text: str, layout: str = "") -> str:
    """Return a text as words of a language, as `say_as` does; "" if it cannot be read so.

    A language without a reader keeps the text as it is written.
    """
    if is_english(language):
        return say_as(kind, text, layout)
    reader, text = reader_of(language), " ".join(text.split())
    return _in_language(reader, language, kind, text, layout) if reader else text


def _in_language(reader: Reader, language: str, kind: str, text: str, layout: str) -> str:
    if kind in ("expletive", "bleep"):
        return BEEP
    if kind in ("digits", "number_digit"):
        return reader.digits(text)
    if kind in ("characters", "spell-out", "verbatim", "telephone"):
        groups = re.findall(r"\w+", text) if kind == "telephone" else [text]
        return ", ".join(_characters_of(reader, group) for group in groups)
    if kind == "ordinal" and (figures := re.match(r"\d{1,4}", text)):
        return reader.ordinal(int(figures.group()))
    if kind == "date" and layout:
        found = _date_parts(text, layout)
        return reader.date(int(found["d"] or 0), int(found["m"] or 0), found["y"])
    return speak_words(AlignedText.of_words(text.split()), language).text


def _characters_of(reader: Reader, text: str) -> str:
    return " ".join(filter(None, (_character_of(reader, c) for c in text)))


def _character_of(reader: Reader, character: str) -> str:
    if character in "0123456789":
        return reader.digits(character)
    return character.upper() if character.isalnum() else reader.sign(character)


def _read(text: str, layout: str) -> str:
    return speak_words(AlignedText.of_words(text.split())).text


def _cardinal(text: str, layout: str) -> str:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return ""
    whole, point, decimals = match[2].replace(",", "").partition(".")
    words = cardinal(int(whole)) if 0 < len(whole) <= MAX_NAMED_DIGITS else digits(whole)
    words = f"{words} {number(point + decimals)}" if decimals else words
    return f"{'minus ' if match[1] == '-' else ''}{words.strip()}"


def _ordinal(text: str, layout: str) -> str:
    match = _WHOLE.fullmatch(text)
    figures = match[1].replace(",", "") if match else ""
    return ordinal(int(figures)) if 0 < len(figures) <= MAX_NAMED_DIGITS else ""


def _digits(text: str, layout: str) -> str:
    return digits("".join(filter(str.isdecimal, text)))


def _characters(text: str, layout: str) -> str:
    return " ".join(filter(None, map(_character, text)))


def _character(character: str) -> str:
    if character in "0123456789":
        return DIGITS[int(character)]
    return ADDRESS_SIGNS.get(character, character.upper() if character.isalnum() else "")


def _date(text: str, layout: str) -> str:
    order = "".join(dict.fromkeys(layout.lower()))  # "yyyymmdd" is "ymd"
    if not order:
        return _read(text, "")
    found = _date_parts(text, order)
    return _date_words(found["d"], found["m"], found["y"])


def _date_parts(text: str, layout: str) -> dict[str, str]:
    """Return the figures of a date by "d", "m" and "y", "" for those that it does not have."""
    order = "".join(dict.fromkeys(layout.lower()))
    if order not in DATE_FORMATS:
        raise ValueError(f"format must be one of {', '.join(DATE_FORMATS)}")
    pattern = r"\D?".join(_DATE_PARTS[part] for part in order)
    if text.isdecimal() and len(order) > 1:  # without signs between
        pattern = pattern.replace("{1,2}", "{2}").replace(r"\D?", "")
    match = re.fullmatch(pattern, text, re.ASCII)
    return {"y": "", "m": "", "d": ""} | (match.groupdict() if match else {})


def _date_words(day: str, month: str, year_text: str) -> str:
    if not month or not day:
        name = MONTHS[int(month) - 1] if month and 1 <= int(month) <= 12 else ""
        known_day = ordinal(int(day)) if day and 1 <= int(day) <= 31 else ""
        known_year = year(int(year_text)) if year_text else ""
        return ", ".join(filter(None, (name or known_day, known_year)))
    return date(int(day), int(month), year_text) or ""


def _time(text: str, layout: str) -> str:
    if match := _MINUTES.fullmatch(text):
        parts = [f"{cardinal(int(match[1]))} minute{'' if int(match[1]) == 1 else 's'}"]
        if match[2]:
            parts.append(f"{cardinal(int(match[2]))} second{'' if int(match[2]) == 1 else 's'}")
        return " and ".join(parts)
    return _read(text, "") if _CLOCK.fullmatch(text) else ""


def _telephone(text: str, layout: str) -> str:
    groups = re.findall(r"[A-Za-z0-9]+", text)
    plus = "plus " if text.startswith("+") else ""
    return plus + ", ".join(_characters(group, "") for group in groups) if groups else ""


def _currency(text: str, layout: str) -> str:
    return _read(text, "") if _MONEY.search(text) else ""


def _fraction(text: str, layout: str) -> str:
    match = _FRACTION.fullmatch(text)
    return fraction(match[1], match[2], match[3]) if match else ""


def _expletive(text: str, layout: str) -> str:
    return BEEP


KINDS: Mapping[str, Callable[[str, str], str]] = {
    "cardinal": _cardinal,
    "number": _cardinal,
    "ordinal": _ordinal,
    "digits": _digits,
    "number_digit": _digits,
    "characters": _characters,
    "spell-out": _characters,
    "verbatim": _characters,
    "date": _date,
    "time": _time,
    "telephone": _telephone,
    "currency": _currency,
    "fraction": _fraction,
    "unit": _read,
    "address": _read,
    "expletive": _expletive,
    "bleep": _expletive,
}
"""`interpret-as` to its reading."""
