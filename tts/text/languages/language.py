"""`Language`: what the reader of a language needs to know, as data and a few functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

MASCULINE, FEMININE, NEUTER = "m", "f", ""
"""Genders for agreement; words of `NEUTER` take the number as it is counted."""


@dataclass(frozen=True, slots=True)
class Noun:
    """Noun that is counted: a unit, a currency, a power of ten."""

    one: str
    many: str
    gender: str = MASCULINE


@dataclass(frozen=True, slots=True)
class Currency:
    """Currency and its hundredth, None for one without."""

    major: Noun
    minor: Noun | None = None


def _as_counted(words: str, gender: str, noun: str) -> str:
    return words


@dataclass(frozen=True, slots=True)
class Language:
    """Words and forms of a language. Templates are those of `str.format`."""

    num2words: str  # name of the language in num2words
    minus: str
    decimal: str  # of a decimal comma
    point: str  # of a dot between figures or in an address
    until: str  # between the ends of a range
    per: str  # of a rate: "€/kg"
    months: tuple[str, ...]
    digits: tuple[str, ...]
    units: Mapping[str, Noun]
    currencies: Mapping[str, Currency]  # by their codes
    money: str  # of {major}, {cents} and {cent}
    of_millions: str  # between whole millions and a currency
    fractions: Mapping[str, str]
    over: str  # in other fractions
    scales: Mapping[str, Noun]  # by their words and abbreviations
    date: str  # of {day}, {month}
    dated: str  # of {date}, {year}
    day_month: str  # pattern between day and month
    hours: Noun  # of a clock
    clock: str  # of {hour}, {hours} and {minute}
    full_hour: str  # of {hour}, {hours}
    ordinal_ending: str  # pattern behind the figures of an ordinal; group 1 is the ending
    ordinal: Callable[[int, str, str, str], str]  # of value, ending, the words before and behind
    abbreviations: Mapping[str, str]  # with their dots
    labels: Mapping[str, str]  # abbreviations in front of a number, with their dots
    signs: Mapping[str, str]
    clock_unit: str = r"h(?:\b|(?=\d))"  # pattern behind an hour
    dotted_clock: str = r"(?!)"  # pattern in front of an hour with a dot before the minutes
    first_day: str = ""  # of a month; "": its number
    is_one_below_two: bool = False  # "1,5 million", "zéro heure"
    spells_decimals: bool = False  # one by one
    months_short: Mapping[str, int] = field(default_factory=dict)
    agree: Callable[[str, str, str], str] = _as_counted  # of number, gender and noun
    gender_of: Callable[[str], str] = lambda noun: MASCULINE
    not_counted: frozenset[str] = frozenset()  # small words behind a number
    century: str = r"(?!)"  # pattern of a Roman number, in group 1
    century_is_ordinal: bool = False
    year: Callable[[int], str] | None = None  # None: as any number
    has_dotted_ordinals: bool = False
    before_ordinals: frozenset[str] = frozenset()  # words that a dotted ordinal follows

    def cardinal(self, number: int) -> str:
        """Return a number in words, as it is counted."""
        return _number_words(self.num2words, number)

    def counted(self, number: int, noun: Noun) -> str:
        """Return a number with a noun: 21 hours are "veintiuna horas"."""
        name = noun.one if number == 1 else noun.many
        return joined(self.agree(self.cardinal(number), noun.gender, name), name)

    def year_words(self, number: int) -> str:
        """Return a year in words."""
        return self.year(number) if self.year else self.cardinal(number)

    @property
    def leading(self) -> frozenset[str]:
        """Abbreviations, without the last dot, after which a sentence does not end."""
        return _leading(tuple(self.abbreviations) + tuple(self.scales))


@lru_cache(maxsize=16)
def _leading(names: tuple[str, ...]) -> frozenset[str]:
    parts = (part for name in names for part in name.split() if name.endswith("."))
    return frozenset(part.removesuffix(".").lower() for part in parts) - {"etc", "ecc", "usw"}


@lru_cache(maxsize=4096)
def _number_words(language: str, number: int) -> str:
    from num2words import num2words  # slow to import, and seldom needed

    words = str(num2words(number, lang=language)).replace(",", "")
    return _spanish_ones(words) if language == "es" else words


@lru_cache(maxsize=1024)
def ordinal_words(language: str, number: int) -> str:
    """Return num2words' ordinal, masculine."""
    from num2words import num2words

    return str(num2words(number, lang=language, to="ordinal"))


def _spanish_ones(words: str) -> str:
    """Return words with the short form of "uno" before thousands and millions."""
    for name in ("mil", "mill"):
        words = words.replace(f"veintiuno {name}", f"veintiún {name}")
        words = words.replace(f"uno {name}", f"un {name}")
    return words


def joined(number: str, noun: str) -> str:
    """Return a number and a noun with a space between them, but not behind "un'"."""
    return number + noun if number.endswith("'") else f"{number} {noun}"


def nouns(text: str) -> dict[str, Noun]:
    """Return "km=kilómetro/kilómetros | h=hora/horas/f" as nouns."""
    found = {}
    for short, forms in (entry.strip().split("=") for entry in text.split("|")):
        one, many, *gender = forms.split("/")
        found[short] = Noun(one, many, gender[0] if gender else MASCULINE)
    return found


def currencies(text: str) -> dict[str, Currency]:
    """Return "EUR=euro/euros + céntimo/céntimos" as currencies."""
    found = {}
    for code, forms in (entry.strip().split("=") for entry in text.split("|")):
        pair = [next(iter(nouns(f"x={form.strip()}").values())) for form in forms.split("+")]
        found[code] = Currency(*pair)
    return found


def pairs(text: str) -> dict[str, str]:
    """Return "Sr.=señor | Sra.=señora" as a mapping."""
    entries = (entry.split("=") for entry in text.split("|"))
    return {short.strip(): " ".join(spoken.split()) for short, spoken in entries}


def names(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())
