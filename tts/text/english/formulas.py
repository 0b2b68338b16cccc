"""Rules that read formulas and source code: powers, comparisons, operators, file names."""

from __future__ import annotations

import re
from re import Match

from tts.text.english.numbers import NUMBER, Rule
from tts.text.english.tables import UNITS

_CONSONANTS = "[b-df-hj-np-tv-z]"
_VOWELS = frozenset("aeiou")
_POWERS = {"2": " squared", "3": " cubed"}


def _power(match: Match[str]) -> str:
    sign = "minus " if match[1].startswith("-") else ""
    words = _POWERS.get(match[1]) or f" to the power of {sign}{match[1].lstrip('-')}"
    return words + " " if match.string[match.end() : match.end() + 1].isalnum() else words


def _scientific(match: Match[str]) -> str:
    sign = "minus " if match[2] == "-" else ""
    return f"{match[1]} times 10 to the power of {sign}{int(match[3])}"


def _product(match: Match[str]) -> str:
    return match.group() if match.group() in UNITS else " ".join(match.group())


def _extension(match: Match[str]) -> str:
    name = match[1]
    is_spelled = not _VOWELS & set(name) and len(name) > 1
    return " dot " + (" ".join(name.upper()) if is_spelled else name)


def _rule(pattern: str, text: str, flags: int = 0) -> Rule:
    """Return a rule whose replacement is a template, as in `re.sub`."""
    return re.compile(pattern, flags), lambda match: match.expand(text)


POWER_RULES: tuple[Rule, ...] = (
    (re.compile(rf"(?<![\w.,])({NUMBER})[eE]([+-]?)(\d{{1,3}})(?!\w)"), _scientific),
    _rule(r"\s?[×x*]\s?(?=10\s?\^)", " times "),
    _rule(rf"(?<=\d)\s?×\s?(?={NUMBER}\s?=)", " times "),
    _rule(
        rf"\b((?:[Cc]ompute|[Cc]alculate|[Ee]valuate|[Ww]hat is|[Ww]hat's)\s{NUMBER})"
        r"\s?[×x*]\s?(?=\d)",
        r"\1 times ",
    ),
    (re.compile(rf"\b(?:{_CONSONANTS}){{2}}(?=\s(?:squared|cubed)\b|\^\d)"), _product),
    (re.compile(r"(?<=[\w)])\s?\^\s?\{?(-?\d+)\}?"), _power),
    _rule(r"(?:(?<=squared)|(?<=cubed)|(?<=\b[b-hj-z])|(?<=\d[a-z])) - (?=\d|[a-z]\b)", " minus "),
    _rule(r"(?<=\d)\s?\*\s?(?=\d)", " times "),
    _rule(r"(?<=\d)\s/\s(?=\d)", " divided by "),
    _rule(r"(?<=\d)!(?=\s*=)", " factorial"),
    _rule(r"\b([fgh])\(([a-z])\)", r"\1 of \2"),
)
OPERATOR_RULES: tuple[Rule, ...] = (
    _rule(r"\b([A-G])#(?!\w)", r"\1 sharp"),
    _rule(r"\s*!==?\s*", " is not equal to "),
    _rule(r"(?<=[\w)])(?:\s+is)?\s*>=\s*(?=[\w(-])", " is greater than or equal to "),
    _rule(r"(?<=[\w)])(?:\s+is)?\s*<=\s*(?=[\w(-])", " is less than or equal to "),
    _rule(r"\s*&&\s*", " and "),
    _rule(r"\s*\|\|\s*", " or "),
    _rule(r"\bCtrl\b", "control"),
    _rule(r"(?<!\S)\*\.(?=\w)", "star dot "),
    _rule(r"(?<![\w/])~/(?=[\w.])", "tilde slash "),
    _rule(r"(?<!\S)\.\./(?=\w)", "dot dot slash "),
    _rule(r"(?<!\S)\./(?=\w)", "dot slash "),
    _rule(r"(?:^|(?<=[\s`'\"(=]))/(?=[a-z])", "slash "),
    _rule(r"\b([A-Z][a-z]?)\+(?=\s+and\b|[,.;)]|\s*$)", r"\1 plus"),
)
FILE_RULES: tuple[Rule, ...] = (
    (re.compile(r"(?<=[A-Za-z])\.([a-z]{2,5})(?![\w'])"), _extension),
    _rule(r"(?<![\w.])\.(?=[A-Za-z])", "dot "),
)
