"""Names of emoji, from Unicode's names of characters."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from re import Match

from tts.text.english.numbers import Rule

EMOJI = (
    "☀-➿⬀-⯿\U0001f300-\U0001f5ff\U0001f600-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001faff"
)
"""Ranges of a regular expression's character class."""

_SHADES = re.compile(r"\b(?:heavy|black|white|sign|symbol|person with|emoji)\b", re.I)


@lru_cache(maxsize=1024)
def emoji_name(character: str) -> str:
    """Return what an emoji shows: "rocket"; "" for a character without a name."""
    name = unicodedata.name(character, "").lower().replace("-", " ")
    return " ".join(_SHADES.sub(" ", name).split())


def _named(match: Match[str]) -> str:
    return f" {emoji_name(match.group().strip())} "


EMOJI_RULES: tuple[Rule, ...] = (
    (re.compile(rf"(?<=[\w,'])\s*[{EMOJI}](?!\s*[{EMOJI}])"), _named),
    (re.compile(rf"[{EMOJI}]+"), lambda match: " "),
)
"""One emoji after words is named; several, and those before a sentence, are decoration."""
