"""Noise keyed by seed and absolute index: any cut gives the same numbers, and they are normal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoder.keyed_noise import keyed_noise


@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(-1000, 10**12), st.data())
def test_any_cut_gives_the_same_numbers(seed, stream, first, data) -> None:
    whole = keyed_noise(seed, stream, first, 40)
    start = data.draw(st.integers(0, 39))
    assert np.array_equal(keyed_noise(seed, stream, first + start, 40 - start), whole[start:])


def test_the_numbers_are_normal() -> None:
    noise = keyed_noise(3, 1, -5000, 200_000).astype(np.float64)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert (noise**4).mean() == pytest.approx(3, abs=0.1)
    assert np.mean(np.abs(noise) < 1) == pytest.approx(0.6827, abs=0.005)
    for lag in (1, 2, 7, 512):
        assert np.mean(noise[lag:] * noise[:-lag]) == pytest.approx(0, abs=0.01)


def test_seeds_and_streams_are_independent() -> None:
    rows = np.stack([keyed_noise(s, k, 0, 100_000) for s in (0, 1, 256) for k in (0, 1)])
    assert np.abs(np.corrcoef(rows.astype(np.float64)) - np.eye(6)).max() < 0.015
