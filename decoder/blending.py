"""Blends of voices that are rows of quantised vectors."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from operator import mul


def blend_voices(
    voices: Sequence[Sequence[int]], weights: Sequence[int], levels: Sequence[int]
) -> tuple[int, ...]:
    """Return the voice whose values are nearest to the weighted means of those of `voices`.

    Each voice has the same number of codes. A code is the index of a combination of quantised
    values, `levels[d]` of them in dimension d, evenly spaced: `CodecSpec.voice_levels`.
    The means are exact: neither the order of the voices nor a common factor of the weights matters.
    """
    total = sum(weights)
    strides = [1, *accumulate(levels[:-1], mul)]

    def blended(codes: Sequence[int]) -> int:
        code = 0
        for size, stride in zip(levels, strides, strict=True):
            values = (code // stride % size for code in codes)
            mean = Fraction(sum(map(mul, weights, values)), total)
            code += stride * round(mean)
        return code

    return tuple(blended(codes) for codes in zip(*voices, strict=True))
