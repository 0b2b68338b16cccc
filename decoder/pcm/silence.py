"""Removal of silence at both ends of an utterance in a stream; pauses inside are unchanged.

    in    ......speech...speech..........
    out      ...speech...speech...          `KEPT_S` are kept at either end

Every decision depends on complete frames at absolute positions: the output does not depend on
the division of the input.
"""

from __future__ import annotations

import numpy as np

FRAME_S = 0.01
SILENCE_RMS = 10 ** (-45 / 20)  # full scale is 1
KEPT_S = 0.05


class SilenceTrimmer:
    """Removes silence at the ends of mono float32. Holds back samples that may be at the end."""

    def __init__(self, sample_rate: int) -> None:
        self._frame = max(1, round(FRAME_S * sample_rate))
        self._kept = round(KEPT_S * sample_rate)
        self._held = np.zeros(0, dtype=np.float32)
        self._num_judged = 0  # number of held samples that were checked: all silent
        self._is_speaking = False
        self.num_dropped = 0
        """Number of removed samples so far, at both ends."""

    @property
    def num_held_silence(self) -> int:
        """Number of held samples that `finish` would remove."""
        return len(self._held) - self._num_kept

    @property
    def _num_kept(self) -> int:
        """Number of held samples that `finish` would keep."""
        return min(self._kept, len(self._held)) if self._is_speaking else 0

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Process float32 [S]; return the samples that are certain (possibly none)."""
        self._held = np.concatenate([self._held, samples])
        complete = len(self._held) - (len(self._held) - self._num_judged) % self._frame
        frames = self._held[self._num_judged : complete].reshape(-1, self._frame)
        loud = np.flatnonzero(np.sqrt((frames.astype(np.float64) ** 2).mean(1)) > SILENCE_RMS)
        start = self._num_judged
        self._num_judged = complete
        if not len(loud):
            return self._shorten()
        first, end = (start + int(k) * self._frame for k in (loud[0], loud[-1] + 1))
        return self._release(0 if self._is_speaking else max(0, first - self._kept), end)

    def finish(self) -> np.ndarray:
        """Return the kept part of the end. The next sample begins a new utterance."""
        ready = self._release(0, self._num_kept)
        self.drop()
        return ready

    def drop(self) -> None:
        """Discard held samples; the next sample begins a new utterance."""
        self.num_dropped += len(self._held)
        self._held, self._num_judged, self._is_speaking = self._held[:0], 0, False

    def _release(self, start: int, end: int) -> np.ndarray:
        ready, self._held = self._held[start:end], self._held[end:]
        self._num_judged = max(0, self._num_judged - end)
        self._is_speaking = self._is_speaking or end > start
        self.num_dropped += start
        return ready

    def _shorten(self) -> np.ndarray:
        """Before the first sound, hold only the samples that will be kept."""
        surplus = 0 if self._is_speaking else max(0, self._num_judged - self._kept)
        self._held = self._held[surplus:]
        self._num_judged -= surplus
        self.num_dropped += surplus
        return self._held[:0]
