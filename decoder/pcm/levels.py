"""Levels of several voices: each segment gets that of the first.

The level of a segment is the mean power of its frames that are not silent, measured in its first
`LOOK_AHEAD_S` of sound, which is held back until then. Its gain is constant.
"""

from __future__ import annotations

import math

import numpy as np

from decoder.pcm.loudness import ENOUGH_S, FRAME_S, LARGEST, SILENCE_RMS

LOOK_AHEAD_S = 1.5
MAX_DB = 12.0
NO_SAMPLES = np.zeros(0, dtype=np.float32)


class _Meter:
    """Level of the first frames of a segment; `num_frames` that are not silent are enough."""

    def __init__(self, frame: int, num_frames: float) -> None:
        self._frame, self._num_frames = frame, num_frames
        self._partial = NO_SAMPLES
        self._power = 0.0  # sum over frames that are not silent
        self.num_loud = 0
        self.peak = 0.0

    @property
    def is_done(self) -> bool:
        return self.num_loud >= self._num_frames

    @property
    def power(self) -> float:
        """Mean power; 0 without sound."""
        return self._power / max(1, self.num_loud)

    def add(self, samples: np.ndarray) -> None:
        self._partial = np.concatenate([self._partial, samples])
        count = len(self._partial) // self._frame
        frames = self._partial[: count * self._frame].reshape(count, self._frame)
        self._partial = self._partial[count * self._frame :]
        for frame in frames:
            if self.is_done:
                return
            power = float((frame.astype(np.float64) ** 2).mean())
            self.peak = max(self.peak, float(np.abs(frame).max()))
            if math.sqrt(power) > SILENCE_RMS:
                self._power += power
                self.num_loud += 1


class LevelMatcher:
    """Matches the levels of segments of mono float32. The first one with sound stays unchanged."""

    def __init__(self, sample_rate: int) -> None:
        self._frame = max(1, round(FRAME_S * sample_rate))
        self._reference = 0.0  # mean power; 0: not known yet
        self._ready = NO_SAMPLES  # held samples of earlier segments
        self._begin()

    def _begin(self) -> None:
        most = LOOK_AHEAD_S / FRAME_S if self._reference else math.inf
        self._meter = _Meter(self._frame, most)
        self._held = NO_SAMPLES

    def begin_segment(self) -> None:
        """Begin another segment with the next sample."""
        self._ready = self.finish()
        if not self._reference and self._meter.num_loud * FRAME_S >= ENOUGH_S:
            self._reference = self._meter.power
        self._begin()

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Process float32 [S]; return the samples whose gain is known (possibly none)."""
        if not self._meter.is_done:
            self._meter.add(samples)
        self._held = np.concatenate([self._held, samples])
        if self._reference and not self._meter.is_done:
            ready, self._ready = self._ready, NO_SAMPLES
            return ready
        return self.finish()

    def finish(self) -> np.ndarray:
        """Return the samples that are held back. The segment may continue."""
        ready = np.concatenate([self._ready, self._held * self._factor()])
        self._ready = self._held = NO_SAMPLES
        return ready

    def _factor(self) -> np.float32:
        meter = self._meter
        if not self._reference or not meter.num_loud:
            return np.float32(1.0)
        wanted = math.sqrt(self._reference / meter.power)
        most = 10 ** (MAX_DB / 20)
        room = max(1.0, LARGEST / meter.peak)
        return np.float32(max(1 / most, min(most, wanted, room)))
