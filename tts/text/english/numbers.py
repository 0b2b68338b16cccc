"""Rules that read digits as English words: dates, times, money, measures, numbers.

Each rule is a pattern and a function from its match to words; `tts.text.normalize` applies them in
order, so that later rules do not match the words of earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from re import Match, Pattern

from tts.text.english.tables import (
    ATTACHED_UNITS,
    DIGITS,
    IRREGULAR_UNITS,
    MONTHS,
    PER_UNITS,
    UNITS,
    WEEKDAYS,
)

Rule = tuple[Pattern[str], Callable[[Match[str]], str]]

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
MAX_CARDINAL_DIGITS = 9  # longer runs without commas are read digit by digit
POWERS = {"squared": "square", "2": "square", "cubed": "cubic", "3": "cubic"}
MAX_NAMED_DIGITS = 66  # the limit of num2words

MONTH = (
    r"((?i:Jan(?:uary)?|Feb(?:ruary)?|Apr(?:il)?|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)|Mar(?:ch)?|MAR(?:CH)?|May|MAY"
    r"|(?:march|may)(?=(?:\s+\d{1,2}(?:st|nd|rd|th)?,?)?\s+[12]\d{3}\b))\b\.?"
)  # "march" and "may" are verbs, too, unless a year follows
DAY = r"(0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?"
YEAR = r"([12]\d{3})(?![\d,.]\d|\d)"
MERIDIEM = r"([AaPp])(?:\.\s?[Mm]\b(?:\.|(?![.\w]))|[Mm]\b(?!\.\w))"

CURRENCIES = {
    "$": ("dollar", "dollars", "cent", "cents"),
    "£": ("pound", "pounds", "penny", "pence"),
    "€": ("euro", "euros", "cent", "cents"),
    "₹": ("rupee", "rupees", "paisa", "paise"),
    "¥": ("yen", "yen", "", ""),
    "₩": ("won", "won", "", ""),
    "₽": ("ruble", "rubles", "kopeck", "kopecks"),
    "₺": ("lira", "lira", "kurush", "kurush"),
    "₪": ("shekel", "shekels", "agora", "agorot"),
    "₦": ("naira", "naira", "kobo", "kobo"),
    "₴": ("hryvnia", "hryvnias", "kopiyka", "kopiykas"),
    "₫": ("dong", "dong", "", ""),
    "₱": ("peso", "pesos", "centavo", "centavos"),
    "฿": ("baht", "baht", "satang", "satang"),
    "₿": ("bitcoin", "bitcoins", "", ""),
    "CHF": ("Swiss franc", "Swiss francs", "centime", "centimes"),
    "AUD": ("Australian dollar", "Australian dollars", "cent", "cents"),
    "CAD": ("Canadian dollar", "Canadian dollars", "cent", "cents"),
    "CNY": ("yuan", "yuan", "", ""),
    "SEK": ("Swedish krona", "Swedish kronor", "", ""),
    "NOK": ("Norwegian krone", "Norwegian kroner", "", ""),
    "DKK": ("Danish krone", "Danish kroner", "", ""),
    "BRL": ("real", "reais", "centavo", "centavos"),
    "MXN": ("Mexican peso", "Mexican pesos", "centavo", "centavos"),
    "ZAR": ("rand", "rand", "cent", "cents"),
}
CURRENCY_CODES = {"USD": "$", "GBP": "£", "EUR": "€", "INR": "₹", "JPY": "¥", "KRW": "₩"}
SCALES = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion", "tn": "trillion"}
SCALE = r"(?:\s?(thousand|million|billion|trillion)\b|(k|K|m|M|bn|b|B|tn)(?!\w))?"
FIXED = {"24/7": "twenty-four seven", "9/11": "nine eleven", "50/50": "fifty fifty"}


@lru_cache(maxsize=4096)
def cardinal(number: int) -> str:
    """Return an integer in words: 1234 is "one thousand two hundred and thirty-four"."""
    from num2words import num2words  # slow to import, and seldom needed

    return str(num2words(number)).replace(",", "")


@lru_cache(maxsize=1024)
def ordinal(number: int) -> str:
    """Return an ordinal: 21 is "twenty-first"."""
    from num2words import num2words

    return str(num2words(number, to="ordinal")).replace(",", "")


@lru_cache(maxsize=1024)
def year(number: int) -> str:
    """Return a year: 1905 is "nineteen oh five", 2026 is "twenty twenty-six"."""
    from num2words import num2words

    return str(num2words(number, to="year")).replace("oh-", "oh ").replace(",", "")


def digits(text: str) -> str:
    """Return the digits of a text one by one; other characters are skipped."""
    return " ".join(DIGITS[int(c)] for c in text if c.isdigit())


def number(text: str) -> str:
    """Return a number with commas and decimals in words: "1,024.50" is "… point five zero"."""
    whole, point, decimals = text.replace(",", "").partition(".")
    is_code = len(whole) > 1 and whole.startswith("0") and not point
    is_long = len(whole) > MAX_CARDINAL_DIGITS and "," not in text
    if not whole:
        words = ""
    elif is_code or is_long or len(whole) > MAX_NAMED_DIGITS:
        words = digits(whole)
    else:
        words = cardinal(int(whole))
    return f"{words} point {digits(decimals)}".strip() if point else words


def _closing(match: Match[str]) -> str:
    """Return "." at the end of the text, where an abbreviation's dot is also the full stop."""
    return "." if match.group().endswith(".") and match.end() == len(match.string) else ""


def _month(text: str) -> str:
    start = text[:3].capitalize()
    return next(name for name in MONTHS if name.startswith(start))


def _weekday(text: str) -> str:
    return WEEKDAYS[text.rstrip(".").lower()]


def _weekday_date(match: Match[str]) -> str:
    words = date(int(match[3]), int(match[2]), None)
    return f"{_weekday(match[1])}, {words}" if words else match.group()


def date(day: int, month: int, year_text: str | None) -> str | None:
    """Return a date with the month first, as in American English; None for an invalid day."""
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    tail = f", {year(int(year_text))}" if year_text else ""
    return f"{MONTHS[month - 1]} {ordinal(day)}{tail}"


def _iso_date(match: Match[str]) -> str:
    words = date(int(match[3]), int(match[2]), match[1])
    if words is None:
        return match.group()
    return f"{words} at {match[4]}" if match[4] else words


def _year_first(match: Match[str]) -> str:
    return date(int(match[3]), int(match[2]), match[1]) or match.group()


def _slash_date(match: Match[str]) -> str:
    first, second, text = int(match[1]), int(match[2]), match[3]
    full = text if len(text) == 4 else ("19" if int(text) > 50 else "20") + text
    words = date(second, first, full) or date(first, second, full)
    return words or match.group()


def _dotted_date(match: Match[str]) -> str:
    return date(int(match[1]), int(match[2]), match[3]) or match.group()


def _day_first(match: Match[str]) -> str:
    tail = f", {year(int(match[4]))}" if match[4] else ""
    article = match[1] or "the "
    return f"{article}{ordinal(int(match[2]))} of {_month(match[3])}{tail}{_closing(match)}"


def _month_first(match: Match[str]) -> str:
    before = match.string[: match.start()]
    is_count = re.match(r"\s[a-z]{3}", match.string[match.end() :]) and match.group()[-1].isdigit()
    if is_count and before.endswith(("In ", "in ")) and not match[4]:
        return match.group()  # "in May 10 people came"
    until = f" to {ordinal(int(match[3]))}" if match[3] else ""
    tail = f", {year(int(match[4]))}" if match[4] else ""
    return f"{_month(match[1])} {ordinal(int(match[2]))}{until}{tail}"


def _clock(match: Match[str]) -> str:
    hour, minute, half = int(match[1]), int(match[2]), match[4]
    second = int(match[3] or 0)
    if minute:
        words = f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
    else:
        words = cardinal(hour) if half and not second else f"{cardinal(hour)} o'clock"
    if second:
        words += f" and {cardinal(second)} second{'' if second == 1 else 's'}"
    return words + (f" {half.upper()} M" if half else "") + _closing(match)


def _duration(match: Match[str]) -> str:
    names = ("hour", "minute", "second")
    parts = [
        f"{cardinal(value)} {name}{'' if value == 1 else 's'}"
        for value, name in zip((int(text) for text in match.groups()[1:]), names, strict=True)
    ]
    return f"{match[1]}{', '.join(parts[:-1])} and {parts[-1]}"


def _hour(match: Match[str]) -> str:
    return f"{cardinal(int(match[1]))} {match[2].upper()} M{_closing(match)}"


def _scale(word: str | None, letter: str | None) -> str:
    return word or (SCALES[letter.lower()] if letter else "")


def _money(match: Match[str]) -> str:
    unit = match[5]
    per = "" if unit is None else f" per {PER_UNITS.get(unit) or UNITS.get(unit, unit)}"
    return _amount(match[1], match[2], _scale(match[3], match[4])) + per


def _money_range(match: Match[str]) -> str:
    first, last = _scale(None, match[3]), _scale(match[5], match[6])
    if first not in ("", last):
        least = f"{number(match[2])} {first}"
    else:
        is_whole = last or "." not in match[2]
        least = number(match[2]) if is_whole else _amount(match[1], match[2], "")
    return f"{least} to {_amount(match[1], match[4], last)}"


def _money_after(match: Match[str]) -> str:
    sign = CURRENCY_CODES.get(match[4], match[4])
    return _amount(sign, match[1], _scale(match[2], match[3]))


def _money_code(match: Match[str]) -> str:
    sign = CURRENCY_CODES.get(match[1], match[1])
    return _amount(sign, match[2], _scale(match[3], match[4]))


def _amount(sign: str, text: str, scale: str) -> str:
    """Return an amount of money: "$", "3.50" is "three dollars and fifty cents"."""
    one, many, minor_one, minor_many = CURRENCIES[sign]
    whole, _, decimals = text.replace(",", "").partition(".")
    if scale or (decimals and (len(decimals) != 2 or not minor_one)):
        return " ".join(filter(None, (number(text), scale, many)))
    whole, minor = whole or "0", int(decimals or 0)
    parts = []
    if int(whole) or not minor:
        parts.append(f"{number(whole)} {one if int(whole) == 1 else many}")
    if minor:
        parts.append(f"{cardinal(minor)} {minor_one if minor == 1 else minor_many}")
    return " and ".join(parts)


def _fraction(match: Match[str]) -> str:
    text = f"{match[2]}/{match[3]}"
    if text in FIXED and not match[1]:
        return FIXED[text]
    words, unit = fraction(match[1], match[2], match[3]), UNITS.get(match[4] or "", "")
    if not unit:
        return words
    return f"{words} {_plural(unit) if match[1] else unit}"


def fraction(whole: str | None, above: str, below: str) -> str:
    """Return a fraction: "3", "1", "2" is "three and a half"; an improper one is "… over …"."""
    top, bottom = int(above), int(below)
    if not 0 < top < bottom:
        return f"{whole or ''} {number(above)} over {number(below)}".strip()
    name = {2: "half", 4: "quarter"}.get(bottom) or ordinal(bottom)
    name += "" if top == 1 else "s"
    if not whole:
        return f"{cardinal(top)} {name}"
    amount = "a" if (top, bottom) == (1, 2) else cardinal(top)
    return f"{number(whole)} and {amount} {name}"


def _degrees(match: Match[str]) -> str:
    scale = {"C": " Celsius", "F": " Fahrenheit", "K": " Kelvin"}.get(match[2] or "", "")
    return f"{number(match[1])} degree{'' if match[1] == '1' else 's'}{scale}"


def _feet_inches(match: Match[str]) -> str:
    feet, inches = (
        ("foot" if match[1] == "1" else "feet"),
        ("inch" if match[2] == "1" else "inches"),
    )
    return f"{number(match[1])} {feet} {number(match[2])} {inches}"


def _measure(match: Match[str]) -> str:
    unit = UNITS[match[2] or match[3]]
    head, per, tail = unit.partition(" per ")
    if match[1] != "1":
        head = _plural(head)
    power = POWERS[match[4]] + " " if match[4] else ""
    rate = f" per {PER_UNITS[match[5]]}" if match[5] else ""
    return f"{number(match[1])} {power}{head}{per}{tail}{rate}"


def _many(match: Match[str]) -> str:
    head, per, tail = UNITS[match[3]].partition(" per ")
    return f"{number(match[1])} {match[2]} {_plural(head)}{per}{tail}"


def _inches(match: Match[str]) -> str:
    dot = "." if not match.string[match.end() :].strip() else ""
    return f"{number(match[1])} inch{'' if match[1] == '1' else 'es'}{dot}"


def _spaced_thousands(match: Match[str]) -> str:
    return f"{int(match.group().replace(' ', '')):,}"


def _plural(unit: str) -> str:
    """Return "liters", "feet", "hertz", "parts" for a unit."""
    return IRREGULAR_UNITS.get(unit) or unit + ("" if unit.endswith("hertz") else "s")


def _thousands(match: Match[str]) -> str:
    is_name = match[2] in "kK" and re.fullmatch(r"\d", match[1]) is not None  # "4K" is a format
    if is_name:
        return match.group()
    return f"{number(match[1])} {SCALES[match[2].lower()]}"


def _decade(match: Match[str]) -> str:
    text = match[1]
    words = year(int(text)) if len(text) == 4 else cardinal(int(text))
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _rule(pattern: str, read: Callable[[Match[str]], str]) -> Rule:
    return re.compile(pattern), read


_SPACED_UNITS = "|".join(sorted((u for u in UNITS if u not in ATTACHED_UNITS), key=len)[::-1])
_GLUED_UNITS = "|".join(ATTACHED_UNITS)
_SIGN = f"[{''.join(sign for sign in CURRENCIES if len(sign) == 1)}]"
_CODES = "|".join((*CURRENCY_CODES, *(code for code in CURRENCIES if len(code) > 1)))
_WEEKDAY = "|".join(name.capitalize() for name in sorted(WEEKDAYS, key=len, reverse=True))
_AM_PM = r"[AaPp]\.?[Mm]\b"

DATE_AND_TIME_RULES: tuple[Rule, ...] = (
    _rule(r"(?<![\w/.-])([12]\d{3})/(\d{1,2})/(\d{1,2})(?![\w/-])", _year_first),
    _rule(r"(?<![\w.-])(?<!ersion )((?:19|20)\d\d)\.(\d\d)\.(\d\d)(?![\w-]|\.\d)", _year_first),
    _rule(r"\b(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z?)?(?![\d-])", _iso_date),
    _rule(r"(?<![\d/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\d/])", _slash_date),
    _rule(r"(?<![\w-])(\d\d)-(\d\d)-([12]\d{3})(?![\w-])", _slash_date),
    _rule(rf"(?<![\w-]){MONTH}-{DAY}()(?:-{YEAR})?(?![\w-])", _month_first),
    _rule(rf"\b({_WEEKDAY})\.?,?\s(\d{{1,2}})/(\d{{1,2}})(?![\d/])", _weekday_date),
    _rule(r"(?<![\d.])(\d{1,2})\.(\d{1,2})\.(\d{4})(?!\.?\d)", _dotted_date),
    _rule(rf"(?<![\w.,:/-])([Tt]he\s+)?{DAY}\s+(?:of\s+)?{MONTH}(?:,?\s+{YEAR})?", _day_first),
    _rule(
        rf"\b{MONTH}\s+{DAY}(?:\s?[-–]\s?{DAY})?(?:,?\s+{YEAR})?(?![\d:%]|[.,/]\d)", _month_first
    ),
    _rule(rf"\b{MONTH}\s+(?=[12]\d{{3}}\b)", lambda m: _month(m[1]) + " "),
    _rule(
        r"((?:time (?:was|is|of)|took|takes|lasted|lasts|finished in|record of)\s)"
        r"(\d{1,2}):([0-5]\d):([0-5]\d)(?![\d:])",
        _duration,
    ),
    _rule(
        rf"(\d\s?(?:{_AM_PM})?)\s?[-–]\s?(?=\d{{1,2}}(?::\d\d)?\s?{_AM_PM})",
        lambda m: f"{m[1]} to ",
    ),
    _rule(r"(?<=:\d\d)\s?[-–]\s?(?=\d{1,2}:\d\d)", lambda m: " to "),
    _rule(
        r"(?<![\w:.])([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?![\d:])" rf"(?:\s?{MERIDIEM})?",
        _clock,
    ),
    _rule(rf"(?<![\w:.,$£€])(0?[1-9]|1[0-2])\.([0-5]\d)()\s?{MERIDIEM}", _clock),
    _rule(rf"(?<![\w:.,])(0?[1-9]|1[0-2])\s?{MERIDIEM}", _hour),
    _rule(r"(?<!\w)ca?\.\s?(?=[1-9]\d{2,3}\b)", lambda m: "circa "),
    _rule(r"(?<=\b[Ii]n )(10\d\d)(?=[,.;:]?(?:\s[A-Z]|$)|,\s)", lambda m: year(int(m[1]))),
)
AMOUNT_RULES: tuple[Rule, ...] = (
    _rule(r"(?:(?<=[\s(=:;])|^)-(?=[\d$£€¥₹]|\.\d)", lambda m: "minus "),
    _rule(
        rf"({_SIGN})\s?({NUMBER})(k|K|m|M|bn|b|B|tn)?\s?[-–]\s?{_SIGN}?({NUMBER}){SCALE}",
        _money_range,
    ),
    _rule(
        rf"(?:\b(?:US|A|C))?({_SIGN})\s?({NUMBER}|\.\d+){SCALE}(?:\s?USD\b)?(?:/([a-z][A-Za-z]*\b|(?=[a-z])))?",
        _money,
    ),
    _rule(rf"(?<![\w.])({NUMBER}){SCALE}\s?([€£¥₹₽₺₪₴₫₱฿₿]|(?:{_CODES})\b)", _money_after),
    _rule(rf"\b({_CODES})\s?({NUMBER}){SCALE}", _money_code),
    _rule(
        rf"(?<![\w.])({NUMBER})\s?¢",
        lambda m: f"{number(m[1])} cent{'' if m[1] == '1' else 's'}",
    ),
    _rule(
        r"(?<![\w/.])(?:(\d+)\s+(?:and\s+)?)?(\d{1,3})/(\d{1,3})(?i:st|nd|rd|th)?(?![\w/])"
        rf"(?:[ -]({_SPACED_UNITS})\b(?!/)(?:\.(?=\s[a-z]))?)?",
        _fraction,
    ),
    _rule(rf"(?<![\w-])({NUMBER})\s?[-–]\s?({NUMBER})(?=\s*=)", lambda m: f"{m[1]} minus {m[2]}"),
    _rule(rf"(?<![\w.,-])({NUMBER})\s?[-–]\s?({NUMBER})(?![\d-])", lambda m: f"{m[1]} to {m[2]}"),
    _rule(rf"(?<![\w.])({NUMBER})\s?°(?:\s?([CFK])\b)?", _degrees),
    _rule(rf"(?<![\w.])({NUMBER})\s?%", lambda m: f"{number(m[1])} percent"),
    _rule(rf"(?<![\w.])({NUMBER})\s?[x×]\s?(?={NUMBER})", lambda m: f"{number(m[1])} by "),
    _rule(r"(?<![\w.,])(10{2,3})s(?= of\b)", lambda m: cardinal(int(m[1]))[4:] + "s"),
    _rule(r"(?<=\d0s)\s?[-–]\s?(?='?(?:[12]\d)?\d0s\b)", lambda m: " to "),
    _rule(r"(?<![\w.,])'?([2-9]0|[12]\d{2}0)'?s\b", _decade),
    _rule(r"(?<![\w.])(\d+)'\s?(\d{1,2})(?:\"|'')(?!\w)", _feet_inches),
    _rule(
        rf"(?<![\w.])({NUMBER}|\.\d+)(?:(?:\s?|-(?=[a-zA-Z]{{2}}))({_SPACED_UNITS})|({_GLUED_UNITS}))"
        rf"(?:\s?(squared\b|cubed\b|[23](?!\d)))?(?:/({'|'.join(PER_UNITS)}))?(?![\w'])"
        r"(?:\.(?=\s[a-z]))?",
        _measure,
    ),
    _rule(
        rf"(?<![\w.])({NUMBER})\s(thousand|[mbtr]{{1,2}}illion)\s({_SPACED_UNITS})\b(?![/'])", _many
    ),
    _rule(rf"(?<![\w.])({NUMBER})\s?in\.(?!\w)", _inches),
    _rule(r"(\d\.\d+)\ss\b(?!')", lambda m: f"{number(m[1])} seconds"),
    _rule(r"(?<![\w.,-])\d{1,3}(?: \d{3})* 000\b(?![.,]?\d)", _spaced_thousands),
    _rule(rf"(?<![\w.])({NUMBER})([kKM])(?!\w)", _thousands),
    _rule(
        r"(?<![\w.])(\d{1,3}(?:,\d{3})+|\d{1,9})(?:st|nd|rd|th)\b",
        lambda m: ordinal(int(m[1].replace(",", ""))),
    ),
    _rule(r"(?:#|\b[Nn]os?\.\s?)(?=\d)", lambda m: "number "),
    _rule(r"\bp\.\s?(?=\d)", lambda m: "page "),
    _rule(
        r"(?<![\w.:])(\d{1,4}):(\d{1,4})(?![\w:])", lambda m: f"{number(m[1])} to {number(m[2])}"
    ),
    _rule(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])", lambda m: " "),
)
NUMBER_RULES: tuple[Rule, ...] = (
    _rule(r"(?<=\d)-(?=\d)", lambda m: " "),
    _rule(r"(?<=[A-Za-z])(?=\.\d)", lambda m: " "),
    _rule(r"(?<![\w.,])(1[1-9]\d\d|20\d\d)(?![\d%]|[.,]\d)", lambda m: year(int(m[1]))),
    _rule(rf"{NUMBER}|\.\d+", lambda m: number(m.group())),
)
