"""Blends of voices: exact means of quantised values, against the codec's own quantiser."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoder import blend_voices
from decoder.codecs.source_filter.modules import FiniteScalarQuantizer

LEVELS = (8, 8, 8, 8, 4)
CODES = st.lists(st.integers(0, 8**4 * 4 - 1), min_size=4, max_size=4).map(tuple)
PARTS = st.lists(st.tuples(CODES, st.integers(1, 1000)), min_size=2, max_size=8)
Parts = list[tuple[tuple[int, ...], int]]


def blend(parts: Parts) -> tuple[int, ...]:
    voices, weights = zip(*parts, strict=True)
    return blend_voices(voices, weights, LEVELS)


@given(PARTS)
def test_the_values_of_a_blend_are_nearest_to_the_means(parts: Parts) -> None:
    quantizer = FiniteScalarQuantizer(LEVELS)
    values = quantizer.values(torch.tensor([codes for codes, _ in parts])).double()
    weights = torch.tensor([weight for _, weight in parts], dtype=torch.float64)
    means = (weights[:, None, None] * values).sum(0) / weights.sum()
    found = quantizer.values(torch.tensor(blend(parts))).double()
    half_steps = 1 / (torch.tensor(LEVELS).double() - 1)
    assert ((found - means).abs() <= half_steps + 1e-6).all()


@given(PARTS, st.integers(2, 9), st.randoms())
def test_neither_the_order_nor_the_scale_of_the_weights_matters(
    parts: Parts, scale: int, chance: Random
) -> None:
    expected = blend(parts)
    assert blend([(codes, scale * weight) for codes, weight in parts]) == expected
    chance.shuffle(parts)
    assert blend(parts) == expected


@given(CODES, st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_a_blend_of_a_voice_with_itself_is_the_voice(
    codes: tuple[int, ...], weights: list[int]
) -> None:
    assert blend([(codes, weight) for weight in weights]) == codes


def test_codes_of_a_small_codebook() -> None:
    """Dimensions of 4 and 2 values: code 5 is (1, 1), code 3 is (3, 0)."""
    assert blend_voices([(5,), (3,)], (1, 1), (4, 2)) == (2,)  # 2 and 1/2, which rounds to 0
    assert blend_voices([(5,), (3,)], (2, 1), (4, 2)) == (6,)  # 5/3 and 2/3
    assert blend_voices([(5,), (3,)], (1, 9), (4, 2)) == (3,)
