"""Rules that read the figures of a `Language`: dates, times, money, measures, numbers.

The rules of all languages are these; `Reader` fills in the words and the patterns of one. They
are applied in order, as those of English are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from re import Match

from tts.text.english.numbers import Rule
from tts.text.english.words import PAUSE_RULES, roman_value
from tts.text.languages.language import Currency, Language, Noun, joined

NUMBER = r"(?:\d{1,3}(?:[. ]\d{3})+(?!\.?\d)(?:,\d+)?|\d+,\d+|\d+\.\d\d(?![\d.])|\d+)"
NO_DIGIT_BEFORE = r"(?<![\w.,])"
MAX_CARDINAL_DIGITS = 12  # longer runs are read digit by digit
MAX_GROUPED_DIGITS = 15
MAX_DECIMALS_AS_NUMBER = 3
FIRST_YEAR, LAST_YEAR = 1100, 2099
SIGNS = {"€": "EUR", "US$": "USD", "R$": "BRL", "$": "USD", "£": "GBP", "¥": "JPY"}
FRACTIONS = dict(zip("½⅓⅔¼¾", ("1/2", "1/3", "2/3", "1/4", "3/4"), strict=True))
SUPERSCRIPTS = {"²": "2", "³": "3"}
MILLION = 10**6
_DOT_DECIMAL = re.compile(r"\d+\.\d\d")


class Reader:
    """Reader of the figures of a language. `rules` are applied in order."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._currencies = dict(language.currencies) | {
            sign: language.currencies[code]
            for sign, code in SIGNS.items()
            if code in language.currencies
        }
        self._units = dict(language.units) | {
            name.replace(sign, digit): noun
            for name, noun in language.units.items()
            for sign, digit in SUPERSCRIPTS.items()
        }
        self._months = {name.lower(): n for n, name in enumerate(language.months, start=1)}
        self._months |= language.months_short
        self.rules: tuple[Rule, ...] = (
            *self._name_rules(),
            *self._date_rules(),
            *self._range_rules(),
            *self._clock_rules(),
            *self._ordinal_rules(),
            *self._amount_rules(),
            *self._number_rules(),
            *self._sign_rules(),
            *PAUSE_RULES,
        )

    # --- numbers

    def number(self, text: str, gender: str = "", noun: str = "") -> str:
        """Return a number as it is written, in words; it agrees with a noun that has a gender."""
        language = self._language
        if _DOT_DECIMAL.fullmatch(text):
            return f" {language.point} ".join(map(self.number, text.split(".")))
        whole, comma, decimals = text.partition(",")
        is_grouped, whole = not whole.isdecimal(), re.sub(r"\D", "", whole)
        is_code = len(whole) > 1 and whole.startswith("0")
        limit = MAX_GROUPED_DIGITS if is_grouped else MAX_CARDINAL_DIGITS
        if is_code or len(whole) > limit:
            words = self.digits(whole)
        else:
            words = language.cardinal(int(whole))
            if gender and not comma:
                words = language.agree(words, gender, noun)
        return f"{words} {language.decimal} {self._decimals(decimals)}" if comma else words

    def digits(self, text: str) -> str:
        """Return the digits of a text one by one."""
        return " ".join(self._language.digits[int(c)] for c in text if c.isdecimal())

    def ordinal(self, number: int) -> str:
        """Return an ordinal that stands by itself."""
        return self._language.ordinal(number, "", "", "")

    def sign(self, sign: str) -> str:
        """Return the name of a sign, "" if it has none."""
        return self._language.signs.get(sign, "")

    def _decimals(self, text: str) -> str:
        if self._language.spells_decimals or len(text) > MAX_DECIMALS_AS_NUMBER:
            return self.digits(text)
        rest = text.lstrip("0")
        zeros = self.digits(text[: len(text) - len(rest)])
        return f"{zeros} {self._language.cardinal(int(rest)) if rest else ''}".strip()

    def _counted(self, text: str, noun: Noun) -> str:
        name = self._form(text, noun)
        return joined(self.number(text, noun.gender, name), name)

    def _form(self, text: str, noun: Noun) -> str:
        is_small = self._language.is_one_below_two and text.startswith(("0,", "1,"))
        return noun.one if text == "1" or is_small else noun.many

    def _number_and_word(self, match: Match[str]) -> str:
        """Read a number, which agrees with the word behind it if it counts that."""
        text, space, word = match[1], match[2] or "", match[3] or ""
        language = self._language
        if text.isdecimal() and len(text) == 4 and FIRST_YEAR <= int(text) <= LAST_YEAR:
            return language.year_words(int(text)) + space
        gender = ""
        if word and word not in language.not_counted:
            gender = language.gender_of(word)
        words = self.number(text, gender, word)
        return words if words.endswith("'") else words + space

    def _dotted(self, match: Match[str]) -> str:
        parts = (self.number(part) for part in match.group().split("."))
        return f" {self._language.point} ".join(parts)

    def _number_rules(self) -> Iterable[Rule]:
        yield _rule(r"(?<=[^\W\d])(?=\d)|(?<=\d)(?=[^\W\d])", lambda m: " ")
        yield _rule(
            rf"{NO_DIGIT_BEFORE}({NUMBER})(?![\d.]*\d)(?:(\s+)(?=([^\W\d_]+)))?",
            self._number_and_word,
        )
        yield _rule(r"\d+(?:\.\d+)+", self._dotted)
        yield _rule(r"\d+", lambda m: self.number(m.group()))

    def _range_rules(self) -> Iterable[Rule]:
        until = self._language.until
        yield _rule(
            rf"(?<![\w.,:/-])({NUMBER})\s?[-–]\s?(?={NUMBER}(?![\d:-]|\s*=))",
            lambda m: f"{self.number(m[1])} {until} ",
        )
        yield _rule(r"(?<=\dh)\s?[-–]\s?(?=\d{1,2}\s?h)", lambda m: f" {until} ")

    def _ordinal_rules(self) -> Iterable[Rule]:
        language = self._language
        yield _rule(rf"{NO_DIGIT_BEFORE}(\d{{1,4}})(?:{language.ordinal_ending})", self._ordinal)
        yield _rule(language.century, self._century)

    def _ordinal(self, match: Match[str]) -> str:
        before = match.string[: match.start()].split()[-2:]
        behind = re.match(r"\s*([^\W\d_]*)", match.string[match.end() :])
        ending = next(filter(None, match.groups()[1:]), "")
        return self._language.ordinal(
            int(match[1]), ending, " ".join(before), behind[1] if behind else ""
        )

    def _century(self, match: Match[str]) -> str:
        value = roman_value(match["roman"])
        if not value:
            return match.group()
        language = self._language
        if language.century_is_ordinal:
            return language.ordinal(value, "", "", "")
        return match.group().replace(match["roman"], language.cardinal(value))

    # --- dates and times

    def date(self, day: int, month: int, year: str = "", before: str = "") -> str:
        """Return a date in words; "" for an invalid one. `before` are the words in front."""
        language = self._language
        if not (1 <= day <= 31 and 1 <= month <= 12):
            return ""
        name = language.months[month - 1]
        if language.has_dotted_ordinals:
            number = language.ordinal(day, ".", before, name)
        elif day == 1 and language.first_day:
            number = language.first_day
        else:
            number = language.cardinal(day)
        date = language.date.format(day=number, month=name)
        if not year:
            return date
        full = year if len(year) == 4 else f"{'19' if int(year) > 50 else '20'}{year}"
        return language.dated.format(date=date, year=language.year_words(int(full)))

    def _figures(self, day: str, month: str, year: str) -> Callable[[Match[str]], str]:
        def read(match: Match[str]) -> str:
            before = _words_before(match)
            words = self.date(int(match[day]), int(match[month]), match[year], before)
            return words or match.group()

        return read

    def _named(self, match: Match[str]) -> str:
        month = self._months[match["m"].lower()]
        before = _words_before(match)
        return self.date(int(match["d"]), month, match["y"] or "", before) or match.group()

    def _date_rules(self) -> Iterable[Rule]:
        language, figures = self._language, self._figures("d", "m", "y")
        yield _rule(r"\b(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)(?![\d-])", figures)
        yield _rule(
            r"(?<![\d./-])(?P<d>\d{1,2})([./-])(?P<m>\d{1,2})\2(?P<y>\d{4}|\d\d)(?![\d/-]|\.\d)",
            figures,
        )
        if language.has_dotted_ordinals:
            yield _rule(r"(?<![\d./-])(?P<d>\d{1,2})\.(?P<m>\d{1,2})\.(?P<y>)(?!\d)", figures)
        months = "|".join(sorted(map(re.escape, self._months), key=len, reverse=True))
        yield _rule(
            rf"(?<![\w.,:/-])(?P<d>\d{{1,2}})(?:\.?º|er|°)?{language.day_month}(?P<m>{months})\b"
            rf"(?:{language.dated.format(date='', year='').rstrip()}\s(?P<y>\d{{4}})(?![.,]?\d))?",
            self._named,
            re.I,
        )

    def _clock(self, match: Match[str]) -> str:
        return self._time(
            int(match[1]), int(match[2] or 0), match[3] if match.re.groups > 2 else ""
        )

    def _time(self, hour: int, minute: int, second: str | None) -> str:
        language, hours = self._language, self._language.hours
        is_one = hour == 1 or (hour == 0 and language.is_one_below_two)
        name = hours.one if is_one else hours.many
        words = {
            "hour": language.agree(language.cardinal(hour), hours.gender, name),
            "hours": name,
            "minute": language.cardinal(minute),
        }
        said = (language.clock if minute else language.full_hour).format(**words)
        if not second:
            return said
        return f"{said} {language.signs['&']} {language.counted(int(second), language.units['s'])}"

    def _clock_rules(self) -> Iterable[Rule]:
        language = self._language
        unit = language.clock_unit
        hour, minute = r"(?<![\w:.,])([01]?\d|2[0-4])", r"([0-5]\d)(?![\d:])"
        yield _rule(
            r"(?<=\d:\d\d)(?:\s?" + unit + r")?\s?[-–]\s?(?=\d{1,2}:\d\d)",
            lambda m: f" {language.until} ",
        )
        yield _rule(rf"{hour}:([0-5]\d)(?::([0-5]\d))?(?![\d:])(?:\s?{unit})?", self._clock)
        yield _rule(
            rf"(?:{language.dotted_clock}){hour}\.{minute}(?!\.?\d)(?:\s?{unit})?", self._clock
        )
        if unit.startswith("h"):
            yield _rule(rf"{hour}\s?{unit}\s?{minute}(?:\s?min\b|(?!\s?[%€$]|\w))", self._clock)
        else:
            yield _rule(rf"{hour}\.{minute}\s?{unit}", self._clock)
            yield _rule(rf"{hour}()\s{unit}", self._clock)

    # --- amounts

    def _money(self, text: str, scale: str, name: str) -> str:
        language = self._language
        currency = self._currencies[name]
        text = text.replace(".", ",") if _DOT_DECIMAL.fullmatch(text) else text
        if scale:
            words = self._counted(text, self._scale(scale))
            return self._of_millions(words, currency)
        whole, _, decimals = text.partition(",")
        figures = re.sub(r"\D", "", whole)
        if not decimals:
            value = int(figures)
            if value >= MILLION and value % MILLION == 0 and language.of_millions:
                return self._of_millions(language.cardinal(value), currency)
            return self._counted(figures if value == 1 else whole, currency.major)
        if len(decimals) != 2 or currency.minor is None:
            return self._counted(text, currency.major)
        return self._change(int(figures), int(decimals), currency, currency.minor)

    def _change(self, whole: int, cents: int, currency: Currency, minor: Noun) -> str:
        language = self._language
        if not cents:
            return language.counted(whole, currency.major)
        small = language.counted(cents, minor)
        if not whole:
            return small
        number, _, cent = small.rpartition(" ")
        major = language.counted(whole, currency.major)
        return language.money.format(major=major, cents=number, cent=cent)

    def _of_millions(self, words: str, currency: Currency) -> str:
        name, of = currency.major.many, self._language.of_millions
        if of.endswith("'"):  # elided before a vowel only
            of = f" {of}" if name[0] in "aeiouyh" else f" {of[:-1]}e "
        return f"{words}{of or ' '}{name}"

    def _scale(self, name: str) -> Noun:
        return self._language.scales[name]

    def _scaled(self, match: Match[str]) -> str:
        return self._counted(match[1], self._scale(match[2]))

    def _measure(self, match: Match[str]) -> str:
        words = self._counted(match[1], self._units[match[2]])
        return words + self._rate(match[3])

    def _rate(self, unit: str | None) -> str:
        return f" {self._language.per} {self._units[unit].one}" if unit else ""

    def _fraction(self, match: Match[str]) -> str:
        text = FRACTIONS.get(match.group()) or match.group()
        if text in self._language.fractions:
            words = self._language.fractions[text]
            return f" {words}" if match.group() in FRACTIONS else words
        return f" {self._language.over} ".join(map(self.number, text.split("/")))

    def _amount_rules(self) -> Iterable[Rule]:
        language = self._language
        scales = _choice(language.scales)
        signs = _choice(self._currencies)
        units = _choice(self._units)
        end = r"(?![\w'’])"
        yield _rule(r"(?:(?<=[\s(=:;])|^)[-−](?=\d|[€$£¥]\d)", lambda m: f"{language.minus} ")
        yield _rule(
            rf"(?<!\w)({signs})\s?({NUMBER})(?:\s?({scales}){end})?(?![\w]|[.,]\d)",
            lambda m: self._money(m[2], m[3] or "", m[1]),
        )
        yield _rule(
            rf"{NO_DIGIT_BEFORE}({NUMBER})(?:\s?({scales}))?\s?(?:(?<=\s)d[ei]\s)?({signs})(?:/({units}))?{end}",
            lambda m: self._money(m[1], m[2] or "", m[3]) + self._rate(m[4]),
        )
        yield _rule(r"(?<![\w.,/])\d{1,3}/\d{1,3}(?![\w/])|[½⅓⅔¼¾]", self._fraction)
        yield _rule(rf"{NO_DIGIT_BEFORE}({NUMBER})\s?({scales}){end}", self._scaled)
        yield _rule(
            rf"{NO_DIGIT_BEFORE}({NUMBER})\s?({units})(?:/({units}))?{end}(?!\.\d)", self._measure
        )

    # --- names and signs

    def _name_rules(self) -> Iterable[Rule]:
        language = self._language
        yield _rule(
            rf"(?<![\w.])({_choice(language.abbreviations, spaced=True)})(?!\w)",
            self._abbreviation,
        )
        yield _rule(
            rf"(?<![\w.])({_choice(language.labels)})\s?(?=\d)",
            lambda m: f"{language.labels[m[1]]} ",
        )
        yield _rule(r"(?<!\w)\+\d{1,3}(?:[ .-]?\d{2,8}){1,5}(?![\w-])", self._phone)

    def _abbreviation(self, match: Match[str]) -> str:
        known = self._language.abbreviations
        name = (
            match[1]
            if match[1] in known
            else next(
                short for short in known if short.replace(" ", "") == match[1].replace(" ", "")
            )
        )
        is_last = not match.string[match.end() :].strip(" \"')]")
        return known[name] + ("." if is_last and name.endswith(".") else "")

    def _phone(self, match: Match[str]) -> str:
        groups = re.findall(r"\d+", match.group())
        return f"{self._language.signs['+']} {', '.join(map(self.digits, groups))}"

    def _sign_rules(self) -> Iterable[Rule]:
        language = self._language
        yield _rule(
            r"(?<=[^\W\d_])\.(?=[^\W\d_]{2})",
            lambda m: f" {language.point} ",
        )
        yield _rule(
            _choice(language.signs),
            lambda m: f" {language.signs[m.group()]} ",
        )
        yield _rule(_choice(SIGNS), lambda m: f" {self._currencies[m.group()].major.many} ")


def _words_before(match: Match[str]) -> str:
    return " ".join(match.string[: match.start()].split()[-2:])


def _choice(names: Iterable[str], *, spaced: bool = False) -> str:
    """Return a pattern of any of the names, the longest first; `spaced`: spaces are optional."""
    found = (re.escape(name) for name in sorted(names, key=len, reverse=True))
    return "|".join(name.replace(r"\ ", r"\s?") if spaced else name for name in found)


def _rule(pattern: str, read: Callable[[Match[str]], str], flags: int = 0) -> Rule:
    return re.compile(pattern, flags), read
