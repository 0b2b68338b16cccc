"""Normalization of English: one table per kind of expression, and properties of all readings."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.text.english import words
from tts.text.english.numbers import cardinal, number
from tts.text.english.tables import ENDINGS, LABELS, NUMBERED, PHRASES, TITLES
from tts.text.lexicon.entries import Lexicon, Pronunciation
from tts.text.normalize import AlignedText
from tts.text.segmenter import SegmentMode, TextNormalization, TextOptions, split_text

WHOLE = TextOptions(max_characters=100_000, mode=SegmentMode.NONE)
RAW = TextOptions(
    max_characters=100_000, mode=SegmentMode.NONE, normalization=TextNormalization.OFF
)


def read(text: str, options: TextOptions = WHOLE) -> str:
    """Return the normalized text as one segment."""
    return " ".join(segment.text for segment in split_text(text, options))


NUMBERS = {
    "0": "zero",
    "7 and 42": "seven and forty-two",
    "1,234,567": "one million two hundred and thirty-four thousand five hundred and sixty-seven",
    "3.14": "three point one four",
    "0.05": "zero point zero five",
    ".5": "point five",
    "it fell to -5": "it fell to minus five",
    "-2.5": "minus two point five",
    "agent 007": "agent zero zero seven",
    "12345678901": "one two three four five six seven eight nine zero one",
    "2,500.75": "two thousand five hundred point seven five",
    "10-20 people": "ten to twenty people",
    "5–6": "five to six",
    "a 10-year-old": "a ten-year-old",
    "v1.2.3": "version one point two point three",
    "10k runners": "ten thousand runners",
    "1.5M users": "one point five million users",
    "24/7": "twenty-four seven",
    "2 + 2 = 4": "two plus two equals four",
    "5 - 3 = 2": "five minus three equals two",
    "16:9": "sixteen to nine",
    "#5 and No. 6": "number five and number six",
    "1920x1080": "one thousand nine hundred and twenty by one thousand and eighty",
}
MONEY = {
    "$5": "five dollars",
    "$1": "one dollar",
    "$0.99": "ninety-nine cents",
    "$0.01": "one cent",
    "$1,234.56": "one thousand two hundred and thirty-four dollars and fifty-six cents",
    "£3.50": "three pounds and fifty pence",
    "£1.01": "one pound and one penny",
    "€1.5 million": "one point five million euros",
    "$2bn": "two billion dollars",
    "20 €": "twenty euros",
    "20 USD": "twenty dollars",
    "¥500": "five hundred yen",
    "50¢": "fifty cents",
    "-$5": "minus five dollars",
    "$20-30": "twenty to thirty dollars",
    "$5/month": "five dollars per month",
    "$20/mo, £10/wk": "twenty dollars per month, ten pounds per week",
    "$.05": "five cents",
    "$50.00-$100.00": "fifty dollars to one hundred dollars",
    "It cost $5.": "It cost five dollars.",
}
DATES = {
    "2026-11-21": "November twenty-first, twenty twenty-six",
    "2026-11-21T14:30": "November twenty-first, twenty twenty-six at fourteen thirty",
    "21 November 2026": "the twenty-first of November, twenty twenty-six",
    "the 3rd of March": "the third of March",
    "11/21/2026": "November twenty-first, twenty twenty-six",
    "21/11/2026": "November twenty-first, twenty twenty-six",
    "21.11.2026": "November twenty-first, twenty twenty-six",
    "Nov. 5th, 1999": "November fifth, nineteen ninety-nine",
    "May 5": "May fifth",
    "May 2026": "May twenty twenty-six",
    "March 3-5": "March third to fifth",
    "you may 5 times": "you may five times",
    "Mon., Jan. 4": "Monday, January fourth",
    "in 1905": "in nineteen oh five",
    "in 2007": "in two thousand and seven",
    "the 1990s": "the nineteen nineties",
    "the '80s": "the eighties",
    "1990-1995": "nineteen ninety to nineteen ninety-five",
    "2026-13-45": "twenty twenty-six thirteen forty-five",
    "25 jul 2012": "the twenty-fifth of July, twenty twelve",
    "JAN 15 2020": "January fifteenth, twenty twenty",
    "on jan. 15 we met": "on January fifteenth we met",
    "in may 2010": "in May twenty ten",
    "they march 20 miles": "they march twenty miles",
    "Jan-15-2020": "January fifteenth, twenty twenty",
    "2016/07/03": "July third, twenty sixteen",
    "15-01-2020": "January fifteenth, twenty twenty",
    "v2024.01.05": "version two thousand and twenty-four point zero one point zero five",
    "the 1960s-80s": "the nineteen sixties to eighties",
}
TIMES = {
    "3:05 pm": "three oh five P M",
    "14:30": "fourteen thirty",
    "at 3:00": "at three o'clock",
    "3pm": "three P M",
    "at 11 a.m. sharp": "at eleven A M sharp",
    "It is 3 p.m.": "It is three P M.",
    "12:05:09": "twelve oh five and nine seconds",
    "10:00:05 a.m. sharp": "ten o'clock and five seconds A M sharp",
    "10:00:00 pm": "ten P M",
    "at 2.30 p.m. sharp": "at two thirty P M sharp",
    "2.30 miles": "two point three zero miles",
    "at 1:00 a.m": "at one A M",
}
ORDINALS_AND_FRACTIONS = {
    "1st": "first",
    "the 22nd": "the twenty-second",
    "100th": "one hundredth",
    "1/2": "one half",
    "3/4": "three quarters",
    "2 1/2 cups": "two and a half cups",
    "2½ cups": "two and a half cups",
    "⅔": "two thirds",
    "7/8": "seven eighths",
    "1/3rd": "one third",
    "50%": "fifty percent",
    "5-10%": "five to ten percent",
}
MEASURES = {
    "5 km": "five kilometers",
    "1 km": "one kilometer",
    "3kg": "three kilograms",
    "100 km/h": "one hundred kilometers per hour",
    "60 mph": "sixty miles per hour",
    "20°C": "twenty degrees Celsius",
    "-4 °F": "minus four degrees Fahrenheit",
    "5'10\"": "five feet ten inches",
    "1 ft": "one foot",
    "6 ft": "six feet",
    "16GB": "sixteen gigabytes",
    "2.4 GHz": "two point four gigahertz",
    "5μm": "five micrometers",
    "45ºC": "forty-five degrees Celsius",
    "12KG": "twelve kilograms",
    ".5kg": "point five kilograms",
    "100 million kg": "one hundred million kilograms",
    "5 in the box": "five in the box",
    "$.00": "zero dollars",
    "$.50": "fifty cents",
    "$0.12/kWh": "twelve cents per kilowatt hour",
}
PHONES_AND_CODES = {
    "555-1234": "five five five, one two three four",
    "(555) 123-4567": "five five five, one two three, four five six seven",
    "+1 (555)-123-4567": "plus one, five five five, one two three, four five six seven",
    "a card ending in 8876": "a card ending in eight eight seven six",
    "the war ending in 1945": "the war ending in nineteen forty-five",
    "2*8": "two times eight",
    "4111 1111 1111 1111": "four one one one, one one one one, one one one one, one one one one",
    "H2O": "H two O",
    "COVID-19": "COVID-nineteen",
    "MP3": "M P three",
}
ABBREVIATIONS = {
    "Dr. Smith": "Doctor Smith",
    "Mr. and Mrs. Jones": "Mister and Missus Jones",
    "Prof Plum": "Professor Plum",
    "St. John lives on Main St.": "Saint John lives on Main Street.",
    "cats vs. dogs": "cats versus dogs",
    "e.g. this, i.e. that": "for example this, that is that",
    "apples, pears, etc.": "apples, pears, et cetera.",
    "Acme Inc. and Sons": "Acme Incorporated and Sons",
    "approx. nine": "approximately nine",
    "J. R. R. Tolkien": "J R R Tolkien",
    "the U.S. Senate": "the U S Senate",
    "w/o sugar, w/ milk": "without sugar, with milk",
    "the FBI and the USA": "the F B I and the U S A",
    "HTTP": "H T T P",
    "NASA": "NASA",
    "STOP THAT RIGHT NOW": "STOP THAT RIGHT NOW",
    "I'LL CALL, WE DON'T": "I'LL CALL, WE DON'T",
    "Henry VIII": "Henry the eighth",
    "World War II": "World War two",
    "Chapter IX": "Chapter nine",
    "CHAPTER I. The Well": "CHAPTER one. The Well",
    "PART XL": "PART forty",
    "THE PART I LIKE": "THE PART I LIKE",
    "I did": "I did",
}
SIGNS = {
    "fish & chips": "fish and chips",
    "AT&T": "AT and T",
    "and/or": "and or",
    "100+": "one hundred plus",
    "C++": "C plus plus",
    "a < b": "a is less than b",
    "@bob #fun": "at bob hashtag fun",
    "www.example.com/a": "W W W dot example dot com slash a",
    "mail bob_k@example.org.": "mail bob underscore k at example dot org.",
    "see [the docs](https://x.org/y) now": "see the docs now",
    "**bold** and `code`": "bold and code",
    "What?! No!!!": "What? No!",
    "wait... what": "wait, what",
    "one — two -- three": "one, two, three",
    "“Quoted” ‘text’": "Quoted text",
    "rock ‘n’ roll, don’t": "rock n roll, don't",
    "<|s_12|>": "s twelve",
    "naïve café ﬁn ß Ł": "naive cafe fin ss L",
    "α and Δt": "alpha and delta t",
    "10 × 3 ÷ 2 ≈ 15": "ten by three divided by two about fifteen",
    "great 😀👍🏽!": "great!",
    "n° 5…": "n degrees five.",
}
TABLES = {
    **NUMBERS,
    **MONEY,
    **DATES,
    **TIMES,
    **ORDINALS_AND_FRACTIONS,
    **MEASURES,
    **PHONES_AND_CODES,
    **ABBREVIATIONS,
    **SIGNS,
}


@pytest.mark.parametrize(("written", "spoken"), TABLES.items())
def test_reading(written: str, spoken: str) -> None:
    assert read(written) == spoken


@pytest.mark.parametrize("written", TABLES)
def test_normalization_is_idempotent(written: str) -> None:
    once = read(written)
    assert read(once) == once


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("Dr. Smith paid $5 at 3:05", "Dr. Smith paid $5 at 3:05"),
        ("“café”  costs £5…", '"cafe" costs pounds 5...'),
        ("a–b — c", "a-b - c"),
        ("<|s_12|> 😀", "<|s_12|>"),
    ],
)
def test_without_normalization_only_unicode_is_normalized(written: str, kept: str) -> None:
    assert read(written, RAW) == kept


def test_letters_of_the_alphabet_are_kept() -> None:
    options = TextOptions(mode=SegmentMode.NONE, ascii_only=False)
    assert read("Über 5 naïve Жук 😀", options) == "Über five naïve Жук"


@pytest.mark.parametrize(
    "text",
    ["", "   \n\n ", "😀", "👩‍👩‍👧 🎉", "...", "?!", "— – -", "“”", "日本語", "\u200b\ufeff"],
)
def test_text_without_words_gives_no_segment(text: str) -> None:
    assert list(split_text(text, TextOptions())) == []


def with_pronunciations(*pairs: tuple[str, str]) -> TextOptions:
    entries = (Pronunciation(phrase, spoken) for phrase, spoken in pairs)
    lexicon = Lexicon.of(entries, ascii_only=True, any_case=True)
    return TextOptions(lexicons=(lexicon,), mode=SegmentMode.NONE)


def test_pronunciations() -> None:
    options = with_pronunciations(
        ("SQL", "sequel"), ("New York", "the city"), ("C++", "see plus"), (".NET", "dot net")
    )
    assert read("It is .NET, not .network", options) == "It is dot net, not dot network"
    assert read("SQL in new  york, not MySQL or C++", options) == (
        "sequel in the city, not MySQL or see plus"
    )
    chained = with_pronunciations(("a", "b"), ("b", "c"))
    assert read("a b", chained) == "b c"
    accented = with_pronunciations(("Nguyễn", "win"))
    assert read("Nguyễn", accented) == "win"


@given(st.text(max_size=80))
def test_normalized_text_is_in_the_alphabet_of_the_model(text: str) -> None:
    safe = "".join(c for c in text if c.isprintable() or c in "\n\t")
    spoken = read(safe)
    assert re.fullmatch(r"[A-Za-z ,.;:?!'-]*", spoken), spoken
    assert spoken == spoken.strip()
    assert "  " not in spoken


@given(st.text(alphabet="0123456789.,:/-$£%°'\" aApPmMtsh#+()", max_size=40))
def test_no_digit_remains(text: str) -> None:
    spoken = read(text)
    assert not re.search(r"\d", spoken)


@given(st.text(max_size=60))
def test_uncleaned_text_is_printable_ascii(text: str) -> None:
    safe = "".join(c for c in text if c.isprintable() or c in "\n\t")
    spoken = read(safe, RAW)
    assert spoken.isascii()
    assert spoken.isprintable() or not spoken


@given(st.integers(min_value=0, max_value=999_999_999))
def test_numbers_read_as_num2words_reads_them(value: int) -> None:
    assert number(f"{value:,}") == number(str(value)) == cardinal(value)
    assert "," not in cardinal(value)


SHORT = (*PHRASES, *ENDINGS, *TITLES, *LABELS, *NUMBERED, "et al", "St", "Ph", "D", "a.k.a", "w/o")
CASES = (str, str.upper, str.title)


@given(
    st.lists(
        st.tuples(
            st.sampled_from((*SHORT, "w/", "dog", "I", "V", "IX", "Max", "min", "7", "J", "")),
            st.sampled_from(CASES),
            st.sampled_from((" ", ". ", ".", ", ", "? ", ".) ", "", "'s ")),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_the_rules_of_abbreviations_are_skipped_only_where_they_change_nothing(
    parts: list[tuple[str, Callable[[str], str], str]],
) -> None:
    text = "".join(case(word) + end for word, case, end in parts)
    if re.search(words.ABBREVIATIONS, text) is None:
        assert AlignedText.of_words([text]).apply(words.ABBREVIATION_RULES).text == text
