"""Counter-based random numbers: one uniform for each (seed, index of the generated token).

Output number `index` of the SplitMix64 stream (Steele, Lea & Flood 2014) that starts at the mixed
seed. There is no state, so a number is the same whatever was drawn before, beside or after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_DROPPED_BITS = np.uint64(11)  # 53 bits fill a float64's mantissa


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """float64 [n] in [0, 1): the number of each (seed, index). Seeds are unsigned 64-bit."""
    seed = np.array(seeds, dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    mixed = _mix(_mix(seed + _GOLDEN) + (index + _ONE) * _GOLDEN)
    return (mixed >> _DROPPED_BITS).astype(np.float64) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> _SHIFTS[0])) * _FACTOR_1
    bits = (bits ^ (bits >> _SHIFTS[1])) * _FACTOR_2
    return bits ^ (bits >> _SHIFTS[2])
