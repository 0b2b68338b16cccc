"""Sounds with a known pitch."""

from __future__ import annotations

import numpy as np

from benchmarks.understood import Clip

RATE = 24_000


def tone(pitch: np.ndarray, harmonics: int = 12) -> Clip:
    """Return harmonics of a pitch in Hz [S], of equal falling levels; silence where it is 0."""
    turns = np.cumsum(pitch / RATE)
    waves = [np.sin(2 * np.pi * n * turns) / n for n in range(1, harmonics + 1)]
    samples = np.sum(waves, 0) * (pitch > 0) * 0.2
    return Clip(samples.astype(np.float32), RATE)


def glide(start_hz: float, end_hz: float, seconds: float) -> np.ndarray:
    """Return a pitch that changes evenly by semitones."""
    return np.geomspace(start_hz, end_hz, round(seconds * RATE))
