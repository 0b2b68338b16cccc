"""The tables of readings: written English, class by class, and what a careful reader says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.reading import (
    BAR_PERCENT,
    FRESH,
    INFORMED,
    OPTIONS,
    Case,
    cases,
    failures,
    published,
    published_failures,
    read,
)
from tts.text.segmenter import split_text

MIN_CASES, MIN_KINDS = 300, 25


@pytest.mark.parametrize("path", [FRESH, INFORMED], ids=lambda path: path.stem)
def test_almost_all_readings_are_those_of_a_careful_reader(path: Path) -> None:
    table = cases(path)
    wrong = failures(table, read)
    percent = 100 * (1 - len(wrong) / len(table))
    assert percent >= BAR_PERCENT, "\n".join(map(str, wrong))


@pytest.mark.parametrize("path", [FRESH, INFORMED], ids=lambda path: path.stem)
def test_the_tables_have_many_classes_and_no_case_twice(path: Path) -> None:
    table = cases(path)
    assert len(table) >= MIN_CASES
    assert len({case.kind for case in table}) >= MIN_KINDS
    assert len({case.written for case in table}) == len(table)


def test_a_case_accepts_each_of_its_readings_and_no_other() -> None:
    case = Case("money", "$2.50", "two dollars (and |)fifty( cents|) | two fifty")
    assert all(
        map(case.accepts, ("Two dollars and fifty cents.", "two-fifty", "two dollars fifty"))
    )
    assert not case.accepts("two dollars and fifteen cents")
    assert Case("cardinal", "101", "one hundred one").accepts("one hundred and one")


def test_published_cases_differ_in_their_words_only(tmp_path: Path) -> None:
    lines = [
        "5pm~five PM",
        "-2~negative two",
        "123~one hundred and twenty three",
        "~123",
        "none",
        "",
    ]
    (tmp_path / "test_cases_time.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "word.txt").write_text("1 ft => one foot\n", encoding="utf-8")
    table = published(tmp_path)
    assert [case.kind for case in table] == ["time"] * 3 + ["word"]
    (wrong,) = published_failures(table, read)
    assert (wrong.case.written, wrong.said) == ("-2", "minus two")


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("Well done 🎉 🎉 🎉", "Well done"),  # a run is decoration
        ("✅ Ready.", "Ready."),  # as is an emoji before a sentence
        ("In May 10, 2019 people came.", "In May tenth, twenty nineteen people came."),
        ("I met Max. 5 left.", "I met Max. five left."),
        ("Similarly, MS-DOS ran.", "Similarly, MS-DOS ran."),
        ("The IV drips.", "The I V drips."),
        ("Call 300 people.", "Call three hundred people."),
        ("John McDonald codes.", "John McDonald codes."),
        (
            "Order #123456.",
            "Order number one hundred and twenty-three thousand four hundred and fifty-six.",
        ),
    ],
)
def test_rules_do_not_match_what_only_resembles_their_text(written: str, spoken: str) -> None:
    assert read(written) == spoken


def test_spoken_words_keep_their_place_in_the_text() -> None:
    for case in (*cases(FRESH), *cases(INFORMED)):
        words = [w for segment in split_text(case.written, OPTIONS) for w in segment.words]
        assert words
        assert all(before.end <= word.start < word.end for before, word in pairwise(words))
        assert words[-1].end <= len(case.written)
