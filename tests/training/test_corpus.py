"""The parts of the corpus that need no installed packages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.corpus import HELD_OUT, clean, reserve


def test_reserved_lines_are_of_all_lengths_and_taken_out() -> None:
    rng = np.random.default_rng(0)
    lines = [
        f"{n:04d}".ljust(int(length), "x") for n, length in enumerate(rng.integers(4, 200, 3000))
    ]
    before = list(lines)
    kept = reserve(lines, 50)
    assert len(kept) == len(set(kept)) == 50
    assert sorted([*lines, *kept]) == sorted(before)
    lengths = sorted(map(len, kept))
    assert lengths[0] <= 5
    assert lengths[-1] >= 195
    assert max(np.diff(lengths)) <= 8


@given(st.integers(1, 40), st.integers(0, 40))
def test_what_is_reserved_is_in_no_other_place(num_lines: int, count: int) -> None:
    lines = [str(n) * (1 + n % 5) for n in range(num_lines)]
    before = set(lines)
    kept = reserve(lines, min(count, num_lines))
    assert set(kept).isdisjoint(lines)
    assert {*kept, *lines} == before


def test_cleaning_takes_brackets_and_doubled_marks_out() -> None:
    assert clean('He said (twice) "no" -- and left ,; then') == "He said no, and left, then"


def test_the_texts_that_are_held_out_are_there() -> None:
    assert all(len(path.read_text().splitlines()) > 50 for path in HELD_OUT)
