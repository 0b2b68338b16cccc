"""Noise keyed by seed and absolute index: independent of the division, and normally distributed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder.keyed_noise import keyed_noise

WORD = 2**64


def noise_of(seed: int, stream: int, first: int, count: int) -> np.ndarray:
    return keyed_noise(seed, stream, torch.tensor([[first]]), count)[0].numpy()


def mixed(word: int) -> int:
    """Return SplitMix64's output for one state, in plain integers."""
    word = (word + 0x9E3779B97F4A7C15) % WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def plain_noise(seed: int, stream: int, index: int) -> float:
    key = mixed((seed * 256 + stream) % WORD)
    bits = mixed(mixed((index + key) % WORD) ^ key)
    radius = math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
    return radius * math.cos((bits % 2**32) * 2 * math.pi / 2**32)


@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(-1000, 10**12))
def test_the_hash_is_that_of_plain_integers(seed: int, stream: int, first: int) -> None:
    expected = [plain_noise(seed, stream, first + k) for k in range(7)]
    np.testing.assert_allclose(noise_of(seed, stream, first, 7), expected, rtol=1e-6, atol=1e-9)


def test_rows_begin_at_their_first_index() -> None:
    rows = keyed_noise(5, 2, torch.tensor([[0], [-3], [10**9]]), 20).numpy()
    for row, first in zip(rows, (0, -3, 10**9), strict=True):
        assert np.array_equal(row, noise_of(5, 2, first, 20))


@given(st.integers(0, 2**63), st.integers(0, 5), st.integers(-1000, 10**12), st.data())
def test_any_cut_gives_the_same_numbers(seed, stream, first, data) -> None:
    whole = noise_of(seed, stream, first, 40)
    start = data.draw(st.integers(0, 39))
    assert np.array_equal(noise_of(seed, stream, first + start, 40 - start), whole[start:])


def test_the_numbers_are_normal() -> None:
    noise = noise_of(3, 1, -5000, 200_000).astype(np.float64)
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert (noise**4).mean() == pytest.approx(3, abs=0.1)
    assert np.mean(np.abs(noise) < 1) == pytest.approx(0.6827, abs=0.005)
    for lag in (1, 2, 7, 512):
        assert np.mean(noise[lag:] * noise[:-lag]) == pytest.approx(0, abs=0.01)


def test_seeds_and_streams_are_independent() -> None:
    rows = np.stack([noise_of(s, k, 0, 100_000) for s in (0, 1, 256) for k in (0, 1)])
    assert np.abs(np.corrcoef(rows.astype(np.float64)) - np.eye(6)).max() < 0.015
