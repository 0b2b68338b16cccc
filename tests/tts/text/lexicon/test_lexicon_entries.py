"""Lexicons in texts: whole words, case, the longest phrase, precedence, and the work they take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tts.text.lexicon.entries import Lexicon, Pronunciation, find_phrases
from tts.text.segmenter import SegmentStream, TextOptions, spoken_text

TEXT = "The train to the coast leaves from platform eleven at seven."


def lexicon_of(*pairs: tuple[str, str], any_case: bool = False) -> Lexicon:
    entries = (Pronunciation(phrase, spoken) for phrase, spoken in pairs)
    return Lexicon.of(entries, ascii_only=True, any_case=any_case)


def read(text: str, *lexicons: Lexicon) -> str:
    return spoken_text(text, TextOptions(lexicons=lexicons))


class CountedLookups(Mapping[str, Pronunciation]):
    """A lexicon's entries that count how often they are asked for one."""

    def __init__(self, entries: Mapping[str, Pronunciation]) -> None:
        self._entries = entries
        self.count = 0

    def __getitem__(self, phrase: str) -> Pronunciation:
        self.count += 1
        return self._entries[phrase]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("a text must not visit all entries")

    def __len__(self) -> int:
        return len(self._entries)


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("SQL and sql", "sequel and sql"),  # capitals match their case only
        ("Polish the Polish vase, POLISH", "Polish the Poh-lish vase, POLISH"),
        ("A tomato. Tomato! TOMATOES", "A tomahto. tomahto! TOMATOES"),  # small letters: any
        ("to New York, New York-wide", "to noo york, noo york-wide"),
        ("New York City is newer", "the city is newer"),  # the longest
        ("New Yorkers", "New Yorkers"),  # whole words
        ("MySQL, SQL's", "MySQL, sequel's"),
        ("in C++ (not C)", "in see plus plus, not sea"),
        ("New\n York", "noo york"),
    ],
)
def test_phrases_are_whole_words_in_their_case(text: str, spoken: str) -> None:
    lexicon = lexicon_of(
        *(("SQL", "sequel"), ("Polish", "Poh-lish"), ("tomato", "tomahto"), ("C", "sea")),
        *(("New York", "noo york"), ("New York City", "the city"), ("C++", "see plus plus")),
    )
    text = text.replace("Polish the", "polish the")
    assert read(text, lexicon) == spoken.replace("Polish the", "polish the")


def test_an_entry_for_this_case_is_preferred_and_the_last_of_two_counts() -> None:
    lexicon = lexicon_of(("us", "uhss"), ("US", "you ess"), ("us", "ahss"))
    assert read("US, us, Us", lexicon) == "you ess, ahss, ahss"
    assert len(lexicon.entries) == 2


def test_the_first_lexicon_takes_precedence_but_a_longer_phrase_counts_before() -> None:
    first = lexicon_of(("new york", "one"), ("SQL", "two"), any_case=True)
    second = lexicon_of(("New York", "three"), ("New York City", "four"), ("SQL", "five"))
    assert read("New York or New York City in sql or SQL", first, second) == (
        "one or four in two or two"
    )


def test_phrases_with_other_letters_are_found_as_their_texts_are_cleaned() -> None:
    assert read("Dvořák, Dvorak", lexicon_of(("Dvořák", "dvor-zhahk"))) == (
        "dvor-zhahk, dvor-zhahk"
    )
    for ascii_only in (True, False):
        said = Pronunciation("5 €", "five yoo-roes")
        lexicon = Lexicon.of([said], ascii_only=ascii_only)
        options = TextOptions(lexicons=(lexicon,), ascii_only=ascii_only)
        assert spoken_text("It is 5 €.", options) == "It is five yoo-roes."


@pytest.mark.parametrize("phrase", ["", " ", "🎉", "日本"])
def test_a_phrase_that_matches_no_word_is_an_error(phrase: str) -> None:
    with pytest.raises(ValueError, match="has no letters"):
        lexicon_of(("good", "x"), (phrase, "y"))


def test_the_applied_entries_are_those_of_the_segment() -> None:
    lexicon = lexicon_of(("one", "wun"), ("two", "too"), ("three", "free"))
    stream = SegmentStream(TextOptions(lexicons=(lexicon,)))
    segments = [*stream.split("One, one and two. Four. Three!")]
    assert [[said.phrase for said in segment.pronunciations] for segment in segments] == [
        ["one", "two"],
        [],
        ["three"],
    ]
    assert segments[0].words[0].spoken == "wun,"


@pytest.mark.parametrize("size", [10, 10_000, 40_000])
def test_the_work_does_not_depend_on_the_number_of_entries(size: int) -> None:
    """A text asks for each word once or twice: for its case, and for any."""
    words = ((f"word{number}", "x") for number in range(size))
    lexicon = lexicon_of(*words, ("platform eleven", "the platform"))
    counted = CountedLookups(lexicon.entries)
    spoken = read(TEXT, replace(lexicon, entries=counted))
    assert spoken == TEXT.replace("platform eleven", "the platform")
    assert counted.count <= 2 * (len(TEXT.split()) + 1) + 2


def test_the_work_is_bounded_where_many_phrases_begin_alike() -> None:
    lexicon = lexicon_of(*((" ".join(["a"] * n) + " b", "x") for n in range(1, 100)))
    counted = CountedLookups(lexicon.entries)
    text = "a " * 400
    assert read(text, replace(lexicon, entries=counted)) == text.strip()
    assert counted.count < 2 * 400 * 100


WORDS = st.sampled_from(["a", "A", "b", "B", "a b", "a b c", "c", "-", "a-b", "c's", ".net", "é"])


@given(st.lists(WORDS, min_size=1, max_size=8), st.lists(WORDS, max_size=6), st.booleans())
def test_found_phrases_are_those_of_a_search_by_alternatives(
    words: list[str], phrases: list[str], any_case: bool
) -> None:
    """The reference is one regular expression of all phrases, the longest first."""
    text = " ".join(words).replace("é", "e")
    lexicon = lexicon_of(*((phrase, "x") for phrase in phrases), any_case=any_case)
    by_length = sorted(phrases, key=lambda p: (len(re.findall(r"\w+|[^\w\s]", p)), len(p)))
    choices = "|".join(
        re.escape(phrase.replace("é", "e"))
        if phrase != phrase.lower() and not any_case
        else f"(?i:{re.escape(phrase.replace('é', 'e'))})"
        for phrase in reversed(by_length)
    )
    pattern = re.compile(rf"(?<!\w)(?:{choices})(?!\w)") if choices else None
    expected = [match.span() for match in pattern.finditer(text)] if pattern else []
    assert [(start, end) for start, end, _ in find_phrases(text, [lexicon])] == expected
