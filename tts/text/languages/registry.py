"""Languages that have a reader, by their codes."""

from __future__ import annotations

from functools import lru_cache

from tts.text.english.numbers import Rule
from tts.text.languages.french import FRENCH
from tts.text.languages.german import GERMAN
from tts.text.languages.italian import ITALIAN
from tts.text.languages.language import Language
from tts.text.languages.portuguese import BRAZILIAN, EUROPEAN
from tts.text.languages.reader import Reader
from tts.text.languages.spanish import SPANISH

ENGLISH = "en"
LANGUAGES = {
    "es": SPANISH,
    "fr": FRENCH,
    "de": GERMAN,
    "it": ITALIAN,
    "pt": BRAZILIAN,
    "pt-pt": EUROPEAN,
}
"""By a BCP-47 language, or a language and a region that reads numbers otherwise."""


def primary(code: str) -> str:
    """Return the language of a BCP-47 code, without script and region."""
    return code.replace("_", "-").partition("-")[0].lower()


@lru_cache(maxsize=64)
def is_english(code: str) -> bool:
    """Return whether a code is of English; "", an unknown language, is read as English."""
    return primary(code) in ("", ENGLISH)


@lru_cache(maxsize=64)
def find_language(code: str) -> Language | None:
    """Return the language of a BCP-47 code; None for English and those without a reader."""
    whole = code.replace("_", "-").lower()
    return LANGUAGES.get(whole) or LANGUAGES.get(primary(code))


@lru_cache(maxsize=64)
def reader_of(code: str) -> Reader | None:
    """Return the reader of a language; None for English and those without one."""
    language = find_language(code)
    return Reader(language) if language else None


def rules_of(code: str) -> tuple[Rule, ...]:
    """Return the rules of a language other than English, () for one without a reader."""
    reader = reader_of(code)
    return reader.rules if reader else ()
