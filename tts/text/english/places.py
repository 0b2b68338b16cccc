"""Rules that read postal addresses: streets, directions, states and their postal codes."""

from __future__ import annotations

import re
from re import Match

from tts.text.english.numbers import Rule, digits
from tts.text.english.tables import DIRECTIONS, STATES, STREETS


def _street(match: Match[str]) -> str:
    is_last = not match.string[match.end() :].strip(" \"')]")
    dot = "." if match.group().endswith(".") and is_last else ""
    return f"{match[1]} {STREETS[match[2].lower()]}{dot}"


def _state(match: Match[str]) -> str:
    code = f", {digits(match[3])}" if match[3] else ""
    return f"{match[1]}{STATES[match[2]]}{code}"


_STREET = "|".join(name.capitalize() for name in STREETS)
_STATE = "|".join(STATES)

ENDS_OF_STREETS = rf"\b(?:{_STREET}|Ste|Apt)\b"

PLACE_RULES: tuple[Rule, ...] = (
    (
        re.compile(rf"\b({_STREET}|St)\.?\s([NSEW])\b\.?(?=[,\s]|$)"),
        lambda match: f"{STREETS.get(match[1].lower(), 'Street')} {DIRECTIONS[match[2]]}",
    ),
    (
        re.compile(
            rf"\b([NSEW])\.?\s+(?=(?:[A-Z][a-z]+|\d+(?:st|nd|rd|th))\s(?:{_STREET}|St|Street|Avenue)\b)"
        ),
        lambda match: DIRECTIONS[match[1]] + " ",
    ),
    (re.compile(rf"\b([A-Z][a-z]+|\d+(?:st|nd|rd|th))\s({_STREET})\b\.?(?!\s+[A-Z])"), _street),
    (
        re.compile(
            rf"\b([A-Z][a-z]+,\s)({_STATE})(?:\s(\d{{5}})(?:-\d{{4}})?)?\b(?![-'/]|\.[A-Z])"
        ),
        _state,
    ),
    (re.compile(rf"\b()({_STATE})\s(\d{{5}})(?:-\d{{4}})?\b"), _state),
    (re.compile(r"\bSte\.?\s(?=\d)"), lambda match: "Suite "),
    (re.compile(r"\bApt\.?\s(?=\w?\d)"), lambda match: "Apartment "),
    (
        re.compile(r"\b(ZIP|[Zz]ip)((?: code)?:?\s)(\d{5})\b"),
        lambda match: f"zip{match[2]}{digits(match[3])}",
    ),
)
