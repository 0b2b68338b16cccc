"""Measures of speech besides words: quality against a reference, pitch, timbre.

Sources: PESQ, ITU-T P.862.2; STOI, Taal et al. 2011; WORLD (F0 and spectral envelope), Morise et
al. 2016; mel-cepstral distance, Kubichek 1993, here after dynamic time warping.
"""

from __future__ import annotations

import warnings

import numpy as np

from training.teacher import SAMPLE_RATE

NUM_CEPSTRA = 24
FRAME_MS = 10.0
FLOOR_HZ = 50.0  # WORLD's default of 71 Hz cuts off half of a voice of 80 Hz
CEPSTRA_TO_DB = float(10 / np.log(10) * np.sqrt(2))


def quality(reference: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    """Return PESQ wide band and STOI of samples on the same time line."""
    from pesq import pesq
    from pystoi import stoi

    length = min(len(reference), len(got))
    pair = reference[:length], got[:length]
    return pesq(SAMPLE_RATE, *pair, "wb"), stoi(*pair, SAMPLE_RATE)


def _world() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reads its own version in a deprecated way
        import pyworld

    return pyworld


class Timbre:
    """Pitch and envelope of one recording."""

    def __init__(self, samples: np.ndarray) -> None:
        world = _world()
        wave = samples.astype(np.float64)
        f0, times = world.dio(wave, SAMPLE_RATE, f0_floor=FLOOR_HZ, frame_period=FRAME_MS)
        f0 = world.stonemask(wave, f0, times, SAMPLE_RATE)
        envelope = world.cheaptrick(wave, f0, times, SAMPLE_RATE, f0_floor=FLOOR_HZ)
        self.voiced = f0 > 0
        self.pitch_hz = float(np.median(f0[self.voiced])) if self.voiced.any() else 0.0
        self.cepstra = world.code_spectral_envelope(envelope, SAMPLE_RATE, NUM_CEPSTRA + 1)

    def mean_envelope(self) -> np.ndarray:
        """Return the mean mel-cepstrum of the voiced frames, without loudness."""
        return self.cepstra[self.voiced, 1:].mean(0)


def envelope_distance(a: Timbre, b: Timbre) -> float:
    """Return the distance between the mean envelopes of two recordings."""
    return float(np.linalg.norm(a.mean_envelope() - b.mean_envelope()))


def mel_cepstral_distance(a: Timbre, b: Timbre) -> float:
    """Return the distance in dB of two readings of one text, frames paired by dynamic time
    warping.
    """
    x, y = a.cepstra[:, 1:], b.cepstra[:, 1:]
    cost = np.linalg.norm(x[:, None] - y[None], axis=-1)
    total, steps = _warp(cost)
    return float(CEPSTRA_TO_DB * total / steps)


def _warp(cost: np.ndarray) -> tuple[float, int]:
    """Return the cost and length of the cheapest monotonic path through [N, M]."""
    rows, columns = cost.shape
    best = np.full((rows + 1, columns + 1), np.inf)
    length = np.zeros((rows + 1, columns + 1), np.int64)
    best[0, 0] = 0.0
    for i in range(1, rows + 1):
        for j in range(1, columns + 1):
            moves = ((i - 1, j - 1), (i - 1, j), (i, j - 1))
            came = min(moves, key=best.__getitem__)
            best[i, j] = best[came] + cost[i - 1, j - 1]
            length[i, j] = length[came] + 1
    return float(best[rows, columns]), int(length[rows, columns])
