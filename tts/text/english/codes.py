"""Rules that read identifiers: book numbers, network addresses, telephones, versions, flights."""

from __future__ import annotations

import re
from collections.abc import Callable
from re import Match

from tts.text.english.numbers import Rule, cardinal, digits, number
from tts.text.english.tables import AIRLINES, DIGITS

_LONGEST_PAIRS = 4  # digits; longer codes are read digit by digit
_MAX_BYTE = 255


def pairs(text: str) -> str:
    """Return a short code as a number is called: "2490" is "twenty-four ninety"."""
    if text.startswith("0") or len(text) > _LONGEST_PAIRS:
        return digits(text)
    head, tail = text[:-2], text[-2:]
    if not head or int(text) % 1000 == 0:
        return cardinal(int(text))
    if tail == "00":
        return f"{cardinal(int(head))} hundred"
    tail_words = f"oh {cardinal(int(tail))}" if tail < "10" else cardinal(int(tail))
    return f"{cardinal(int(head))} {tail_words}"


def characters(text: str) -> str:
    """Return letters and digits one by one: "3A" is "three A"."""
    return " ".join(DIGITS[int(c)] if c.isdigit() else c.upper() for c in text if c.isalnum())


def _grouped(text: str) -> str:
    return ", ".join(characters(part) for part in re.findall(r"\w+", text))


def _book_number(match: Match[str]) -> str:
    return f"{match[1]} {_grouped(match[2])}"


def _hardware_address(match: Match[str]) -> str:
    return _grouped(match.group())


def _ip6(match: Match[str]) -> str:
    signs = {"::": " colon colon ", ":": " colon "}
    parts = re.split(r"(::?)", match.group())
    return "".join(signs.get(part) or characters(part) for part in parts).strip()


def _ip4(match: Match[str]) -> str:
    parts = match[1].split(".")
    if any(int(part) > _MAX_BYTE for part in parts):
        return match.group()
    words = " dot ".join(pairs(part) for part in parts)
    prefix = f" slash {number(match[2])}" if match[2] else ""
    port = f" port {pairs(match[3])}" if match[3] else ""
    return words + prefix + port


def _phone(text: str) -> str:
    plus = "plus " if text.startswith("+") else ""
    return plus + ", ".join(digits(part) for part in re.findall(r"\d+", text))


def _spell_phone(match: Match[str]) -> str:
    return _phone(match.group())


def _toll_free(match: Match[str]) -> str:
    return f"{digits(match[1])} {DIGITS[int(match[2])]} hundred "


def _labelled_phone(match: Match[str]) -> str:
    return match[1] + _phone(match[2])


def _short_call(match: Match[str]) -> str:
    return re.sub(r"\d+", lambda found: digits(found.group()), match.group())


def _dotted_number(match: Match[str]) -> str:
    words = " point ".join(number(part) for part in match.group().split("."))
    return words + " " if match.string[match.end() : match.end() + 1].isalpha() else words


def _flight(match: Match[str]) -> str:
    return f"{' '.join(match[1])} {pairs(match[2])}"


def _any_version(match: Match[str]) -> str:
    words = " point ".join(number(part) for part in match[1].split("."))
    return f"{words} point {'star' if match[2] == '*' else 'x'}"


def _named_flight(match: Match[str]) -> str:
    return f"{match[1]}{' '.join(match[2])} {pairs(match[3])}"


def _model(match: Match[str]) -> str:
    return f"{match[1]} {pairs(match[2])}"


def _pension_plan(match: Match[str]) -> str:
    return f"{pairs(match[1])} {match[2]}"


def _rule(pattern: str, read: Callable[[Match[str]], str]) -> Rule:
    return re.compile(pattern), read


_HEX = "[0-9A-Fa-f]"
_AFTER_SHORT_CALL = "or|and|in|for|if|now|when|to|immediately|right|at|from|on|first|instead"

IDENTIFIER_RULES: tuple[Rule, ...] = (
    _rule(
        r"\b((?:ISBN|ISSN|SSN|EAN|UPC|IMEI)(?:-1[03])?:?(?: is| number| no\.)?)\s+"
        r"(\d[\dX -]{5,}[\dX])(?![\w-])",
        _book_number,
    ),
    _rule(rf"(?<![\w:])(?:{_HEX}{{2}}[:-]){{5}}{_HEX}{{2}}(?![\w:])", _hardware_address),
    _rule(
        rf"(?<![\w:])(?=[A-Fa-f:]*\d){_HEX}{{1,4}}(?::{_HEX}{{1,4}})*::(?:{_HEX}{{1,4}}(?::{_HEX}{{1,4}})*)?(?![\w:])",
        _ip6,
    ),
    _rule(rf"\b0[xX]({_HEX}+)\b", lambda m: f"zero x {characters(m[1])}"),
    _rule(rf"#(?=\d*[A-Fa-f])(?=[A-Fa-f]*\d)({_HEX}{{6}})\b", lambda m: f"hash {characters(m[1])}"),
    _rule(r"\b([45]\d\d)\(([a-z])\)", _pension_plan),
    _rule(
        r"(?<![\w.])(?<![Vv]ersion )((?:\d{1,3}\.){3}\d{1,3})"
        r"(?:/(\d{1,2}))?(?::(\d{2,5}))?(?![\w:]|\.\d)",
        _ip4,
    ),
    _rule(r"\b(localhost|[Hh]ost|[Ss]erver):(?=\d{2,5}\b)", lambda m: f"{m[1]} port "),
    _rule(rf"\b({'|'.join(AIRLINES)})(\d{{2,4}})\b", _flight),
    _rule(rf"\b({'|'.join(AIRLINES)})\s(\d{{3,4}})\b", _flight),
    _rule(r"\b([Ff]lights?\s)([A-Z][A-Z\d])\s?(\d{1,4})\b", _named_flight),
    _rule(
        r"\b(Boeing|Airbus|[Ff]light|Route|[Hh]ighway|Interstate|[Rr]oom|Porsche|[Tt]he(?= 7\d7))"
        r"\s+(\d{3,4})\b(?![.,]\d)",
        _model,
    ),
    _rule(r"\b([A-Z]{1,3})-?(\d{3,4})\b(?![.,:-]\d)", _model),
)
PHONE_RULES: tuple[Rule, ...] = (
    _rule(
        r"\b((?:(?:[Cc]ards?|[Aa]ccounts?|[Nn]umbers?|Visa|Mastercard|Amex)\s[Ee]nding (?:in|with)"
        r"|PIN|OTP|otp|[Pp]asscode)(?: is|:)?\s)(\d{3,6})\b(?![.,]\d)",
        lambda m: f"{m[1]}{digits(m[2])}",
    ),
    _rule(r"(?<![\w-])(1)[ .-](8)00[ .-](?=\w)", _toll_free),
    _rule(
        r"(?<![\w-])(?:\+?\d{1,3}(?:[ .-]|(?=\()))?(?:\(\d{3}\)[ -]?|\d{3}[ .-])\d{3}[ .-]\d{4}"
        r"(?:-\d{1,4})?(?![\w-])",
        _spell_phone,
    ),
    _rule(r"(?<!\w)\+\d{1,3}(?:[ .-]?\d{2,8}){1,5}(?![\w-])", _spell_phone),
    _rule(
        r"\b((?:[Tt]el|[Tt]elephone|[Pp]hone|[Ff]ax|[Mm]obile|[Cc]ell)"
        r"(?: no| number)?\.?:?(?: is)?\s)"
        r"(\+?\(?\d[\d() /.-]{4,}\d)(?![\w-])",
        _labelled_phone,
    ),
    _rule(r"(?<![\w.,-])\(?0\)?\d{1,4}[ /-]\d{3,8}(?:[ -]\d{2,8})*(?![\w-]|[.,]\d)", _spell_phone),
    _rule(
        r"(?<![\w-])(?:\d{3}-\d{4}|\d{3}-\d\d-\d{4}|\d{4}(?:[ -]\d{4}){2,4})(?![\w-])", _spell_phone
    ),
    _rule(
        rf"\b(?:[Dd]ial|[Cc]all|[Cc]alled|[Rr]ing)\s\d{{3}}(?:\sor\s\d{{3}})?\b(?![.,:-]\d)"
        rf"(?!\s(?!(?:{_AFTER_SHORT_CALL})\b)\w)",
        _short_call,
    ),
    _rule(r"\b(?:ext|Ext)\.?\s?(?=\d)", lambda m: "extension "),
)
VERSION_RULES: tuple[Rule, ...] = (
    _rule(r"\b[vV]\.?\s?(?=\d+\.\d)", lambda m: "version "),
    _rule(r"(?<![\w.])(\d+(?:\.\d+)*)\.([x*])(?!\w)", _any_version),
    _rule(r"(?<![\w.])\d+(?:\.\d+){2,}", _dotted_number),
)
