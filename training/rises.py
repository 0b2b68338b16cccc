"""The rise of a pitch at the end of a line, by which a question is heard as one."""

from __future__ import annotations

import numpy as np

LOWEST_HZ = 55.0
GLIDE_S = 0.025  # next to a pause, where curves glide to and from nothing
END_S, BEFORE_S = 0.05, 0.3  # the last voiced part of a sentence, and what is before it
FEWEST_S = 0.12  # of both with voice, otherwise there is no rise
RISES = 1.0  # semitones


def steady(pitch: np.ndarray, hop_s: float) -> np.ndarray:
    """Return a pitch in Hz [T], one value in every `hop_s`, NaN where there is no voice and next to
    such a place."""
    voiced = pitch > LOWEST_HZ
    for _ in range(round(GLIDE_S / hop_s)):
        voiced = voiced & np.append(voiced[1:], False) & np.append(False, voiced[:-1])
    return np.where(voiced, pitch, np.nan)


def rise_at_end(pitch: np.ndarray, hop_s: float) -> float:
    """Return how far the end of a pitch in Hz [T], NaN without voice, is above its lowest value
    shortly before, in semitones; NaN without voice. A value is `hop_s` seconds long."""
    voiced = np.flatnonzero(pitch > 0)
    at = voiced[voiced > voiced[-1] - (END_S + BEFORE_S) / hop_s] if len(voiced) else voiced
    if len(at) * hop_s < FEWEST_S:
        return float("nan")
    semitones, last = 12 * np.log2(pitch[at]), round(END_S / hop_s)
    return float(np.median(semitones[-last:]) - semitones[:-last].min())
