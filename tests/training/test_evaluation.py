"""The parts of corpus and evaluation that need no installed packages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.corpus import clean, reserve
from training.measures import Timbre, _warp
from training.phonemes import Reading
from training.teacher import SAMPLE_RATE


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


def path_cost(cost: np.ndarray) -> tuple[float, int]:
    """Return the cost of the cheapest path, by trying all of them."""
    rows, columns = cost.shape
    best = (np.inf, 0)
    stack = [(0, 0, float(cost[0, 0]), 1)]
    while stack:
        i, j, total, length = stack.pop()
        if (i, j) == (rows - 1, columns - 1):
            best = min(best, (total, length))
        for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)):
            if a < rows and b < columns:
                stack.append((a, b, total + float(cost[a, b]), length + 1))
    return best


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_warping_finds_the_cheapest_path(rows: int, columns: int, seed: int) -> None:
    cost = np.random.default_rng(seed).random((rows, columns))
    total, length = _warp(cost)
    assert (total, length) == (pytest.approx(path_cost(cost)[0]), path_cost(cost)[1])


def test_a_recording_said_more_slowly_is_no_farther() -> None:
    x = np.random.default_rng(3).normal(size=(20, 4))
    cost = np.linalg.norm(x[:, None] - np.repeat(x, 2, axis=0)[None], axis=-1)
    assert _warp(cost) == (pytest.approx(0.0), 40)


@pytest.mark.parametrize(
    ("wanted", "got", "right"),
    [
        ("a / b / c", "a / b / c", 3),
        ("a / b / c", "a / c", 2),
        ("a / b / c", "a / x / b / c", 3),
        ("a / b / c", "a / x / c", 2),
        ("a", "", 0),
        ("", "a", 0),
    ],
)
def test_words_that_are_right(wanted: str, got: str, right: int) -> None:
    reading = Reading("x", wanted, got)
    assert (reading.num_right, reading.is_exact) == (right, wanted == got)
    assert reading.num_words == (wanted.count("/") + 1 if wanted else 0)


@pytest.mark.parametrize("pitch_hz", [60.0, 80.0, 120.0, 250.0])
def test_the_pitch_of_a_low_voice_is_found(pitch_hz: float) -> None:
    pytest.importorskip("pyworld")
    t = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    partials = np.arange(1, 20) * pitch_hz
    wave = (np.sin(2 * np.pi * partials[:, None] * t) / np.arange(1, 20)[:, None]).sum(0) / 10
    timbre = Timbre(wave)
    assert timbre.pitch_hz == pytest.approx(pitch_hz, rel=0.02)
    assert timbre.voiced.mean() > 0.8
    assert np.isfinite(timbre.mean_envelope()).all()
