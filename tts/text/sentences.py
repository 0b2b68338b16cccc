"""Detection of the ends of sentences and clauses, word by word.

Each decision depends on the word, the previous and at most the next one, not on how the text was
cut into fragments; None means that the next word is needed.
"""

from __future__ import annotations

import re

from tts.text.english.tables import (
    BEFORE_DIGITS,
    ENDINGS,
    LEANING,
    MONTH_DOTS,
    MONTHS,
    NUMBER_WORDS,
    PHRASES,
    STARTERS,
    TITLES,
    UNITS,
    WEEKDAYS,
)
from tts.text.languages.language import Language

CLOSERS = "\"')]}*_"
APOSTROPHES = "['’]"
OPENERS = "\"'([{*_"
MIN_CLAUSE_CHARACTERS = 24  # shorter ones are joined to the next
_DOTTED = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")
_ORDINAL = re.compile(r"[0-9]{1,3}|[0-9]{1,2}\.[0-9]{1,2}")  # with a dot behind it
_LIST_MARKER = re.compile(r"[-*–—]|\(?[0-9]{1,3}[.)]|\(?[A-Za-z]\)")
_ANY_CASE_TITLES = ("mr", "mrs", "ms", "dr", "prof")


def ends_sentence(
    previous: str, word: str, following: str | None, language: Language | None = None
) -> bool | None:
    """Return whether a sentence ends after `word`. `previous` is "" at the start of a sentence.

    `language` None: English, or a language without a reader.
    """
    core = word.rstrip(CLOSERS)
    if not core.endswith((".", "!", "?")):
        return False
    if core != word or core.endswith(".."):
        return None if following is None else not _starts_small(following)
    if not core.endswith("."):
        return True
    stem = core[:-1].lstrip(OPENERS)
    if language is not None:
        return _ends_at_dot_of(language, previous, stem, following)
    return _ends_at_dot(previous, stem, following)


def _ends_at_dot_of(
    language: Language, previous: str, stem: str, following: str | None
) -> bool | None:
    is_letter = len(stem) == 1 and stem.isalpha()
    is_marker = not previous and stem.isdigit()
    if stem.lower() in language.leading or is_letter or is_marker:
        return False
    if f"{re.split(APOSTROPHES, stem)[-1]}." in language.labels:
        return None if following is None else not following[:1].isdigit()
    if language.has_dotted_ordinals and _ORDINAL.fullmatch(stem):
        if previous.lower() in language.before_ordinals:
            return False
        is_date = following is not None and following.strip(CLOSERS + ".,") in language.months
        return None if following is None else not (is_date or _starts_small(following))
    if _DOTTED.fullmatch(stem) is None:
        return True
    return None if following is None else not _starts_small(following)


def _ends_at_dot(previous: str, stem: str, following: str | None) -> bool | None:
    low = stem.lower()
    is_marker = not previous and (stem.isdigit() or (len(stem) == 1 and stem.isalpha()))
    if low in PHRASES or _is_title(stem) or is_marker:
        return False
    is_measure = previous[-1:].isdigit() and stem in UNITS and len(stem) > 1
    if not (is_measure or _is_abbreviation(stem)):
        return True
    if following is None:
        return None
    return not _starts_small(following) if is_measure else _ends_before(low, following)


def _is_abbreviation(stem: str) -> bool:
    """Return whether a word is an abbreviation or an initial, whose dot may be a full stop too."""
    low = stem.lower()
    is_date = stem[:1].isupper() and (low in MONTH_DOTS or low in WEEKDAYS)
    is_short = (
        low in ENDINGS or low in (*BEFORE_DIGITS, "st") or (len(stem) == 1 and stem.isalpha())
    )
    return is_short or is_date or _DOTTED.fullmatch(stem) is not None


def _ends_before(low: str, following: str) -> bool:
    """Return whether the dot of an abbreviation is a full stop, decided by the next word."""
    if low in BEFORE_DIGITS:
        return not following[:1].isdigit()
    if low == "etc":
        return not _starts_small(following)
    return following.strip(OPENERS + CLOSERS + ",") in STARTERS


def _is_title(stem: str) -> bool:
    low = stem.lower()
    return low in _ANY_CASE_TITLES or (low in TITLES and stem[:1].isupper())


def _starts_small(word: str) -> bool:
    return word.lstrip(OPENERS)[:1].islower()


def ends_clause(word: str, following: str | None) -> bool | None:
    """Return whether a clause ends after `word`; not in "November 21, 2026"."""
    core = word.rstrip(CLOSERS)
    if core in ("-", "–", "—", "--"):
        return True
    if not core.endswith((",", ";", ":", "—")):
        return False
    if core[-2:-1].isdigit() or core[:-1] in MONTHS:
        return None if following is None else not following[:1].isdigit()
    return True


def starts_item(word: str) -> bool:
    """Return whether a word at the start of a line begins an item of a list."""
    return _LIST_MARKER.fullmatch(word) is not None


def is_safe_break(word: str, following: str) -> bool:
    """Return whether text may be cut between two words without splitting a date or an amount."""
    has_digit = any(c.isdigit() for c in word + following)
    return not has_digit and not word.endswith(".") and word[-1:].isalpha()


def is_phrase_break(word: str, following: str) -> bool:
    """Return whether a speaker could pause between two words inside a clause.

    Not behind an article or another word that leans on the next one, nor inside a name or a number
    in words.
    """
    bare = word.strip(OPENERS + CLOSERS).lower()
    is_name = word[:1].isupper() and following.lstrip(OPENERS)[:1].isupper()
    is_number = bare in NUMBER_WORDS and following.strip(".,;:!?" + CLOSERS) in NUMBER_WORDS
    is_bound = bare in LEANING or is_name or is_number
    return is_safe_break(word, following) and not is_bound
