"""Normally distributed noise as a pure function of (seed, stream of numbers, absolute index).

A codec that adds noise renders the same sample alike in whatever window, batch or order it is
computed, because no generator has a state: each number is hashed from its index.

Source of the hash: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014); of the shape: Box and Muller 1958.
"""

from __future__ import annotations

import math

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WORD = 2**64


def keyed_noise(seed: int, stream: int, first: int, count: int) -> np.ndarray:
    """float32 [count]: standard normal numbers of the indices first … first + count - 1.

    `first` may be negative; `stream` keeps the numbers of different layers apart.
    """
    key = _mix(np.array([(seed * 0x100 + stream) % _WORD], dtype=np.uint64))
    index = np.array([first % _WORD], dtype=np.uint64) + np.arange(count, dtype=np.uint64)
    bits = _mix(_mix(index + key) ^ key)
    radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)) + 0.5) / 2**32))
    angle = (bits & np.uint64(0xFFFFFFFF)) * (2 * math.pi / 2**32)
    return (radius * np.cos(angle)).astype(np.float32)


def _mix(words: np.ndarray) -> np.ndarray:
    """Every input bit changes about half of the output bits; uint64 arithmetic wraps around."""
    words = words + _GAMMA
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words = (words ^ (words >> np.uint64(shift))) * multiplier
    return words ^ (words >> np.uint64(31))
