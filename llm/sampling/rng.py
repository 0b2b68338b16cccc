"""Counter-based random numbers: one uniform for each (seed, index of the generated token).

Output number `index` of the SplitMix64 stream (Steele, Lea & Flood 2014) that starts at the mixed
seed. The generator is stateless: a number does not depend on other draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB
DROPPED_BITS = 11  # 53 bits fill a float64's mantissa
MASK = 2**64 - 1
FEW = 8  # up to this number plain integers are faster than arrays


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """Return float64 [n] in [0, 1): the number of each (seed, index). Seeds are unsigned 64-bit."""
    if len(seeds) <= FEW:
        pairs = zip(seeds, indices, strict=True)  # mixed as by `stream_start`
        numbers = [mix(mix(seed + GOLDEN) + (index + 1) * GOLDEN) for seed, index in pairs]
        return np.array([(number >> DROPPED_BITS) * 2.0**-53 for number in numbers])
    seed = np.array(seeds, dtype=np.uint64)
    index = np.array(indices, dtype=np.uint64)
    golden = np.uint64(GOLDEN)
    mixed = _mix_all(_mix_all(seed + golden) + (index + np.uint64(1)) * golden)
    return (mixed >> np.uint64(DROPPED_BITS)).astype(np.float64) * 2.0**-53


def stream_start(seed: int) -> int:
    """Return the start of a seed's stream: number `index` is the mixed `start + (index + 1) g`."""
    return mix(seed + GOLDEN)


def skip(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return uint64 [n] starts of the streams that begin `counts` [n] numbers later."""
    return starts + counts.astype(np.uint64) * np.uint64(GOLDEN)


def mix(bits: int) -> int:
    bits &= MASK
    bits = ((bits ^ (bits >> 30)) * FACTOR_1) & MASK
    bits = ((bits ^ (bits >> 27)) * FACTOR_2) & MASK
    return bits ^ (bits >> 31)


def _mix_all(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FACTOR_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(FACTOR_2)
    return bits ^ (bits >> np.uint64(31))
