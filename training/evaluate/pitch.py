"""Pitch of a clip in every 10 ms, by the autocorrelation of its samples."""

from __future__ import annotations

import numpy as np
import soxr

from benchmarks.understood import Clip
from training.rises import LOWEST_HZ

RATE = 8_000
HOP, WINDOW = 80, 480  # samples: 10 ms, and 60 ms, three periods of the lowest pitch
HIGHEST_HZ = 500.0
VOICED = 0.6  # autocorrelation of a frame with voice
NEARLY = 0.88  # share of the best peak at which a shorter period is preferred: no octave below
LOUD_DB = 30.0  # below the loudest frame: quieter ones have no voice
MEDIAN = 5  # frames
HOP_S = HOP / RATE


def pitch_of(clip: Clip) -> np.ndarray:
    """Return float64 [T] in Hz, one value in every 10 ms, NaN where there is no voice."""
    samples = soxr.resample(clip.samples, clip.sample_rate, RATE).astype(np.float64)
    if len(samples) < WINDOW:
        return np.zeros(0)
    frames = np.lib.stride_tricks.sliding_window_view(samples, WINDOW)[::HOP]
    frames = frames - frames.mean(1, keepdims=True)
    alike = _autocorrelation(frames)
    first, last = int(RATE / HIGHEST_HZ), int(RATE / LOWEST_HZ)
    inner = alike[:, first : last + 1]
    peaks = (inner >= alike[:, first - 1 : last]) & (inner >= alike[:, first + 1 : last + 2])
    heights = np.where(peaks, inner, 0.0)
    best = heights.max(1)
    chosen = (heights >= NEARLY * best[:, None]).argmax(1)
    power = np.square(frames).mean(1)
    voiced = (best > VOICED) & (power > power.max() * 10 ** (-LOUD_DB / 10))
    period = first + chosen + _offset(alike, first + chosen)
    return _smooth(np.where(voiced, RATE / period, np.nan))


def median_pitch(clip: Clip) -> float:
    """Return the median pitch of a clip in Hz; NaN without voice."""
    pitch = pitch_of(clip)
    return float(np.median(pitch[pitch > 0])) if np.any(pitch > 0) else float("nan")


def _autocorrelation(frames: np.ndarray) -> np.ndarray:
    """Return the normalised autocorrelation of frames [T, WINDOW] by lag, each of the samples that
    overlap."""
    spectrum = np.fft.rfft(frames, 2 * WINDOW)
    product = np.fft.irfft(np.square(np.abs(spectrum)))[:, :WINDOW]
    energy = np.square(frames).cumsum(1)
    lags = np.arange(WINDOW)
    early = energy[:, WINDOW - 1 - lags]
    late = energy[:, -1:] - np.where(lags, energy[:, lags - 1], 0.0)
    return product / np.sqrt(np.maximum(early * late, 1e-12))


def _offset(alike: np.ndarray, lag: np.ndarray) -> np.ndarray:
    """Return how far the top of the parabola through a peak is from its lag, in samples."""
    row = np.arange(len(alike))
    before, here, after = (alike[row, lag + step] for step in (-1, 0, 1))
    bend = before - 2 * here + after
    return np.where(bend < 0, 0.5 * (before - after) / np.minimum(bend, -1e-9), 0.0)


def _smooth(pitch: np.ndarray) -> np.ndarray:
    """Replace every pitch by the median of its neighbours with voice."""
    padded = np.pad(pitch, MEDIAN // 2, constant_values=np.nan)
    near = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN)
    found = np.full(len(pitch), np.nan)
    kept = ~np.isnan(pitch)
    found[kept] = np.nanmedian(near[kept], axis=1)
    return found
