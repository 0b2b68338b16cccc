"""The rise of a pitch at the end of a line, by which a question is heard as one."""

from __future__ import annotations

import numpy as np

LOWEST_HZ = 55.0
GLIDE_S = 0.025  # next to a pause, where curves glide to and from nothing
END_S, BEFORE_S = 0.05, 0.3  # the last voiced part of a sentence, and what is before it
FEWEST_S = 0.12  # of both with voice, otherwise there is no rise
RISES = 1.0  # semitones
ALMOST = 0.85  # semitones: below, a pitch does not rise
FLATTENED = 0.5  # of what it rises there


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


def emphasised(pitch: np.ndarray, hop_s: float, semitones: float) -> np.ndarray:
    """Return a pitch in Hz [T], one value in every `hop_s`, whose rise at the end is clearer: one
    of `RISES` and more is `semitones` higher, one below `ALMOST` is `FLATTENED`.

    Only what follows the lowest value there changes; values without voice stay as they are.
    """
    made = pitch.astype(np.float64)
    own = steady(made, hop_s)
    rise = rise_at_end(own, hop_s)
    if not rise > 0 or ALMOST <= rise < RISES:
        return pitch
    factor = (rise + semitones) / rise if rise >= RISES else FLATTENED
    voiced = np.flatnonzero(own > 0)
    at = voiced[voiced > voiced[-1] - (END_S + BEFORE_S) / hop_s][: -round(END_S / hop_s)]
    lowest = at[np.argmin(own[at])]
    changed = (np.arange(len(made)) > lowest) & (made > own[lowest])
    made[changed] *= (made[changed] / own[lowest]) ** (factor - 1)
    return made
