"""Rules for addresses, abbreviations, acronyms, signs and mark-up."""

from __future__ import annotations

import re
from itertools import pairwise
from re import Match

from tts.text.english.numbers import Rule, cardinal, ordinal
from tts.text.english.tables import (
    ADDRESS_SIGNS,
    BIBLE,
    DOMAINS,
    ENDINGS,
    LABELS,
    MONTH_DOTS,
    MONTHS,
    NUMBERED,
    PHRASES,
    REIGNING,
    SIGN_WORDS,
    SPELLED,
    SPELLED_DOMAINS,
    STARTERS,
    TITLES,
    WEEKDAYS,
    WORDS_IN_CAPITALS,
)

MAX_SPELLED = 5  # letters of an acronym
VOWELS = frozenset("AEIOUY")
_NO_PREFIX = "".join(rf"(?<!\b{name})" for name in ("Mc", "Mac", "De", "Di", "La", "Le", "Du"))
_MONTH_NAMES = MONTH_DOTS | {"may": "May"}
_ROMAN = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}


def spell(letters: str) -> str:
    """Return separate letters: "USA" is "U S A"."""
    return " ".join(c.upper() for c in letters if c.isalnum())


def _address(match: Match[str]) -> str:
    text = re.sub(r"^(?:https?|ftp)://", "", match.group(), flags=re.I)
    body = text.rstrip(".,;:!?)'\"]>")
    parts = re.findall(r"[A-Za-z]+|\d+|[^\w\s]|_", body)
    spoken = (_address_part(part, sign) for sign, part in pairwise(("", *parts)))
    return " ".join(filter(None, spoken)) + text[len(body) :]


def _address_part(part: str, sign: str) -> str:
    """Return a part of an address in words; `sign` is the part before it."""
    if not part.isalnum():
        return ADDRESS_SIGNS.get(part, "")
    if part.isdigit():
        return part if len(part) < MAX_SPELLED else " ".join(part)
    low = part.lower()
    is_short = 1 < len(part) <= MAX_SPELLED and not VOWELS & set(part.upper())
    if is_short or (sign == "." and low in SPELLED_DOMAINS) or low in ("faq", "api", "url", "id"):
        return spell(part)
    return part


def _is_start_of_sentence(match: Match[str]) -> bool:
    return re.match(r"\s+[\"'(]?[A-Z]", match.string[match.end() :]) is not None


def _dot_after(match: Match[str]) -> str:
    """Return "." where an abbreviation's dot is also the full stop."""
    is_last = not match.string[match.end() :].strip(" \"')]")
    return "." if match.group().endswith(".") and (is_last or _is_start_of_sentence(match)) else ""


def _title(match: Match[str]) -> str:
    return TITLES[match[1].lower()] + " "


def _phrase(match: Match[str]) -> str:
    return PHRASES[match[1].lower()]


def _ending(match: Match[str]) -> str:
    spoken = ENDINGS.get(match[1].lower())  # None for "ınc": a pattern ignores more than case
    is_name = match[1] == "EST" or match.string[: match.start()].endswith("dot ")
    return match.group() if spoken is None or is_name else spoken + _dot_after(match)


def _saint_or_street(match: Match[str]) -> str:
    before = match.string[: match.start()].rstrip().rsplit(" ", 1)[-1]
    follows_name = before[:1].isupper() or before[-2:] in ("st", "nd", "rd", "th")
    if _is_start_of_sentence(match) and not (follows_name and match.group().endswith(".")):
        return "Saint"
    return "Street" + _dot_after(match) if follows_name else match.group()


def _weekday(match: Match[str]) -> str:
    return WEEKDAYS[match[1].lower()] + ", "


def _lone_weekday(match: Match[str]) -> str:
    return WEEKDAYS[match[1].lower()]


def _day_range(match: Match[str]) -> str:
    return f"{WEEKDAYS[match[1].lower()]} to {WEEKDAYS[match[2].lower()]}{_dot_after(match)}"


def _month_range(match: Match[str]) -> str:
    first, last = (_MONTH_NAMES[match[group].lower()] for group in (1, 2))
    return f"{first} to {last}{_dot_after(match)}"


def _month_name(match: Match[str]) -> str:
    return MONTH_DOTS[match[1].lower()] + _dot_after(match)


def _dotted_letters(match: Match[str]) -> str:
    return spell(match[1]) + _dot_after(match)


def roman_value(text: str) -> int | None:
    """Return the value of a valid Roman numeral below 400, else None."""
    if not re.fullmatch(r"C{0,3}(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})", text) or not text:
        return None
    values = [_ROMAN[c] for c in text]
    following = [*values[1:], 0]
    return sum(-v if v < n else v for v, n in zip(values, following, strict=True))


def _roman(match: Match[str]) -> str:
    name, text = match[1], match[2]
    value = roman_value(text)
    kind = name.capitalize()
    is_pronoun = text == "I" and f"{name} {text}" not in ("War I", "Type I", "Phase I", "Class I")
    is_letter = len(text) == 1 and name != kind  # "a top-level X window"
    if value is None or is_pronoun or is_letter or kind in STARTERS:
        return match.group()
    if kind in NUMBERED:
        return f"{name} {cardinal(value)}"
    if kind in REIGNING and len(text) > 1:
        return f"{name} the {ordinal(value)}"
    if name != kind or len(text) == 1 or text.strip("IVX"):
        return match.group()
    before = match.string[: match.start()].rstrip().rsplit(" ", 1)[-1]
    is_person = before.rstrip(".") in (*REIGNING, "Mister", "Doctor", "Senator", "President")
    return f"{name} the {ordinal(value)}" if is_person else f"{name} {cardinal(value)}"


def _heading(match: Match[str]) -> str:
    value = roman_value(match[2])
    return f"{match[1]} {cardinal(value)}" if value else match.group()


def _reigning(match: Match[str]) -> str:
    value = roman_value(match[2])
    return f"{match[1]} the {ordinal(value)}" if value else match.group()


def _small_roman(match: Match[str]) -> str:
    value = roman_value(match[2].upper())
    return f"{match[1]} {cardinal(value)}" if value else match.group()


def _century(match: Match[str]) -> str:
    value = roman_value(match[1])
    return ordinal(value) if value else match.group()


def _verse(match: Match[str]) -> str:
    return f"{BIBLE[match[1]]} {match[2]} {match[3]}"


def _final_acronym(match: Match[str]) -> str:
    is_spelled = match[2] in SPELLED or (len(match[1]) > 2 and not VOWELS & set(match[2]))
    return f"{match[1]} {match[2]}" if is_spelled else match.group()


def _acronym(match: Match[str]) -> str:
    word, plural = match[1], match[2]
    is_shouted = not re.search(r"[a-z]", match.string) and match.string.count(" ") > 1
    is_said = VOWELS & set(word) and (is_shouted or word not in SPELLED)
    if is_said or word in WORDS_IN_CAPITALS:
        return match.group()
    return spell(word) + ("s" if plural else "")


def _code_letters(match: Match[str]) -> str:
    is_word = match.group() in ("NO", "IN", "AT", "OF", "TO", "OR", "BY", "ON", "IS", "AS", "ME")
    is_attached = match.string[match.end() : match.end() + 1].isdigit()
    return spell(match.group()) if is_attached or not is_word else match.group()


def _choices(*tables: dict[str, str]) -> str:
    words = sorted((re.escape(w) for table in tables for w in table), key=len, reverse=True)
    return "|".join(words)


def _capitalised(table: dict[str, str]) -> str:
    return _choices({word.capitalize(): "" for word in table})


def _rule(pattern: str, text: str, flags: int = 0) -> Rule:
    """Return a rule whose replacement is a template, as in `re.sub`."""
    return re.compile(pattern, flags), lambda match: match.expand(text)


_DAY = _capitalised(WEEKDAYS)
_NUMBERED = "|".join((*NUMBERED, *(name.upper() for name in NUMBERED)))
_MONTH = _capitalised(_MONTH_NAMES)

CALENDAR_NAMES = rf"\b(?:{_DAY}|{_MONTH})\b"

ADDRESS_RULES: tuple[Rule, ...] = (
    _rule(r"!?\[([^\]\[]+)\]\((?:https?://)?\S*?\)", r"\1"),
    (re.compile(r"\b(?:(?:https?|ftp)://|www\.)\S+", re.I), _address),
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), _address),
    (
        re.compile(rf"(?<![\w@.])[\w-]+(?:\.[\w-]+)*\.(?:{'|'.join(DOMAINS)})\b(?:/[^\s,;)]*)?"),
        _address,
    ),
    (re.compile(rf"\b({'|'.join(BIBLE)})\.\s(\d{{1,3}}):(\d{{1,3}})\b"), _verse),
    _rule(r"(?:^|(?<=\s))[:;=8]-?[)(DPpOo|\\/](?=\s|$)", ""),
)
CAPITAL_RULES: tuple[Rule, ...] = (
    _rule(rf"{_NO_PREFIX}(?<=[a-z])(?=[A-Z]+[a-z])(?![A-Z]+s\b)", " "),
    (re.compile(r"\b([a-z]+|[A-Z][a-z]+)([A-Z]{2,4})\b"), _final_acronym),
    _rule(r"(?<=[A-Z]{2})(?=[A-Z](?!s\b)[a-z])", " "),
    _rule(r"\bpH\b", "P H"),
)
ABBREVIATIONS = (
    r"\.\s*\S|\s[IVXLC]|\b(?:M[rst]s?|Dr|Prof|St|al|etc|Ph\.?\s?D)"
    rf"|(?i:vs|w/|(?<!\w)(?:{_choices(PHRASES, ENDINGS)})\.\s*$)"
)
"""Pattern found in every text that one of `ABBREVIATION_RULES` changes."""

ABBREVIATION_RULES: tuple[Rule, ...] = (
    (re.compile(rf"\b({_NUMBERED})\s+(I)(?=\s*(?:[.:,;–—-]|$))(?!['.]\w)"), _heading),
    (re.compile(rf"\b({_NUMBERED.upper()})\s+([VX]|[IVXLC]{{2,}})\b(?!['.]\w)"), _heading),
    _rule(r"(^M|\bm)(ax|in)\.\s?(?=\d)", r"\1\2imum "),
    (re.compile(rf"\b({_choices(LABELS)})\.\s?(?=\d)", re.I), lambda m: LABELS[m[1].lower()] + " "),
    (re.compile(rf"\b({_capitalised(TITLES)}|mrs?|ms|dr|prof)\.\s*(?=[A-Z])"), _title),
    (re.compile(r"\b(Mrs?|Ms)\.\s*"), _title),
    (re.compile(r"\b(Mrs?|Ms|Dr|Prof|Mt)\s+(?=[A-Z])"), _title),
    (re.compile(rf"(?<![\w.])({_choices(PHRASES)})\.(?!\w)", re.I), _phrase),
    (re.compile(r"(?<![\w.])(e\.g|i\.e)(?![\w.])", re.I), _phrase),
    (re.compile(r"(?<!\w)(vs)(?=\s)", re.I), _phrase),
    _rule(r"\bet al\b\.?", "and others"),
    (re.compile(rf"\b({_choices(ENDINGS)})\.(?!\w)", re.I), _ending),
    _rule(r"(?<![/\w])etc\b", "et cetera"),
    (re.compile(r"\bSt\b\.?(?!\w)"), _saint_or_street),
    _rule(r"\ba\.k\.a\.?(?!\w)", "also known as", re.I),
    _rule(r"\bPh\.?\s?D(s?)\b\.?(?!\w)", r"P H D\1"),
    (re.compile(r"(?<![\w.])((?:[A-Za-z]\.){2,})(?!\w)"), _dotted_letters),
    _rule(r"\b([A-Z])\.(?=\s+[A-Z])", r"\1"),
    _rule(r"(?<!\w)w/o(?!\w)", "without", re.I),
    _rule(r"(?<!\w)w/(?=\s?[A-Za-z])", "with ", re.I),
)
CALENDAR_RULES: tuple[Rule, ...] = (
    (
        re.compile(rf"\b({_capitalised(WEEKDAYS)})\b(?:\.,?|,)\s+(?=(?:{'|'.join(MONTHS)})\b)"),
        _weekday,
    ),
    (re.compile(rf"\b({_DAY})\.?\s?[-–]\s?({_DAY})\b\.?"), _day_range),
    (re.compile(rf"\b({_MONTH})\.?\s?[-–]\s?({_MONTH})\b\.?"), _month_range),
    (re.compile(rf"\b({_DAY})\.(?=,?\s(?:[a-z]|\d))"), _lone_weekday),
    (re.compile(rf"\b({_capitalised(MONTH_DOTS)})\.(?!\w)"), _month_name),
)
ROMAN_RULES: tuple[Rule, ...] = (
    (
        re.compile(
            r"\b((?:King|Queen|Pope|Emperor|Empress|Tsar|Czar|Kaiser|Sultan)\s[A-Z][a-z]+)"
            r"\s([IVX]+)\b(?!['.]\w)"
        ),
        _reigning,
    ),
    (re.compile(r"\b([A-Za-z][a-z]+)\s+([IVXLC]+)\b(?!['.]\w)"), _roman),
    (
        re.compile(
            r"\b((?:[Aa]ct|[Ss]cene|[Cc]hapter|[Pp]art|[Bb]ook|[Vv]olume|[Pp]ages?)) ([ivx]{2,})\b"
        ),
        _small_roman,
    ),
    (re.compile(r"\b([IVX]{2,})(?=\s[Cc]entur)"), _century),
)
ACRONYM_RULES: tuple[Rule, ...] = (
    _rule(r"\bOK\b", "okay"),
    _rule(r"\bWWII\b", "World War two"),
    (re.compile(r"\b([A-Z]{2})(?=\s?\d)"), _code_letters),
    (re.compile(r"(?<!')(?<![A-Z]-)\b([A-Z]{2,5})(s?)\b(?!'[A-Z])"), _acronym),
)
SIGN_RULES: tuple[Rule, ...] = (
    _rule(r"\band/or\b", "and or", re.I),
    _rule(r"(?<=[A-Za-z])&(?=[A-Za-z])", " and "),
    _rule(r"(?<![\w@])@(?=\w)", "at "),
    _rule(r"(?<!\w)#(?=[A-Za-z])", "hashtag "),
    _rule(r"\s*&\s*", " and "),
    _rule(r"(?<=[a-z\d])\s*\+\s*(?=[a-z\d])", " plus ", re.I),
    _rule(r"(?<=[a-z])\+\+", " plus plus", re.I),
    _rule(r"(?<!\w)\+(?=\w)", "plus "),
    _rule(r"(?<=\w)\+(?!\w)", " plus"),
    _rule(r"(?<=[\w)])\s*=+\s*(?=[\w(/~])", " equals "),
    _rule(r"(?<=\w)\s+<\s+(?=\w)", " is less than "),
    _rule(r"(?<=\w)\s+>\s+(?=\w)", " is greater than "),
    _rule(r"(?<=[a-z])\s+\*\s+(?=[a-z])", " times ", re.I),
    _rule(r"(?<=\w)\^(?=\w)", " to the power of "),
    _rule(r"(?<!\w)~(?=\w)", "about "),
    _rule(r"(?<=\w)\s?%", " percent"),
    _rule(r"\$(?=\s|$)", " dollars "),
    _rule(r"(?<=[a-z])/(?=[a-z])", " slash ", re.I),
    _rule(r"(?<=[a-z])\.(?=[a-z]{2})", " dot "),
    (re.compile("|".join(SIGN_WORDS)), lambda match: f" {SIGN_WORDS[match.group()]} "),
)
PAUSE_RULES: tuple[Rule, ...] = (
    _rule(r"\s*(?:-{1,2}>|=>|—|--+|(?<=\s)[–-](?=\s)|–)\s*", ", "),
    _rule(r"\s*[(\[{]\s*|\s*[)\]}]\s*(?=[A-Za-z\d])", ", "),
)
