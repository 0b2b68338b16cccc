"""Loudness normalisation over the segments of one utterance.

A language model generates each segment independently, with varying loudness. The first that
is long enough sets the level and passes unchanged. Later ones move towards it, slowly and by
`MAX_DB` at most:

    level of a segment so far   mean power of its frames that are not silent
    target gain                 reference / level, weighted by the length of the segment so far
    gain                        follows the target by `MAX_STEP_DB` per frame, linear in between

A frame's gain depends on earlier frames only, so that no samples are delayed, and on the segment's
frame grid, so that the output does not depend on the division of the input.
"""

from __future__ import annotations

import math

import numpy as np

FRAME_S = 0.02
SILENCE_RMS = 10 ** (-45 / 20)
MAX_DB = 6.0
MAX_STEP_DB = 0.25
TRUST_S = 0.4  # length of a segment at which the target gain has half its weight
ENOUGH_S = 0.3  # minimum length of sound for a segment to set the reference
LARGEST = 0.98


class LoudnessNormalizer:
    """Normalises mono float32, segment by segment."""

    def __init__(self, sample_rate: int) -> None:
        self._frame = max(1, round(FRAME_S * sample_rate))
        self._reference: float | None = None  # mean power
        self._begin()

    def _begin(self) -> None:
        self._partial = np.zeros(0, dtype=np.float32)  # samples of the current frame so far
        self._power = 0.0  # sum over frames that are not silent
        self._num_loud = 0
        self._peak = 0.0
        self._from_db = self._to_db = 0.0  # gain over the current frame

    def begin_segment(self) -> None:
        """Begin another segment."""
        if self._reference is None and self._num_loud * FRAME_S >= ENOUGH_S:
            self._reference = self._power / self._num_loud
        self._begin()

    @property
    def only_measures(self) -> bool:
        """Whether there is no reference yet, so that `process` changes nothing."""
        return self._reference is None

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Return as many samples as float32 [S]; unchanged until there is a reference."""
        pieces = []
        done = 0
        while done < len(samples):
            piece = samples[done : done + self._frame - len(self._partial)]
            if self._reference is not None:
                pieces.append(piece * self._ramp(len(self._partial), len(piece)))
            self._partial = np.concatenate([self._partial, piece])
            done += len(piece)
            if len(self._partial) == self._frame:
                self._end_frame()
        return samples if self._reference is None else np.concatenate([samples[:0], *pieces])

    def _ramp(self, start: int, count: int) -> np.ndarray:
        """Return factors float32 [count] from a position in the current frame."""
        places = (start + np.arange(count)) / self._frame
        db = self._from_db + (self._to_db - self._from_db) * places
        return (10 ** (db / 20)).astype(np.float32)

    def _end_frame(self) -> None:
        power = float((self._partial.astype(np.float64) ** 2).mean())
        self._peak = max(self._peak, float(np.abs(self._partial).max()))
        self._partial = self._partial[:0]
        if math.sqrt(power) > SILENCE_RMS:
            self._power += power
            self._num_loud += 1
        step = self._target_db() - self._to_db
        self._from_db = self._to_db
        self._to_db += max(-MAX_STEP_DB, min(MAX_STEP_DB, step))

    def _target_db(self) -> float:
        if self._reference is None or not self._num_loud:
            return 0.0
        measured_s = self._num_loud * FRAME_S
        difference = 10 * math.log10(self._reference * self._num_loud / self._power)
        wanted = difference * measured_s / (measured_s + TRUST_S)
        room = 20 * math.log10(LARGEST / self._peak) if self._peak else MAX_DB
        return max(-MAX_DB, min(MAX_DB, wanted, max(0.0, room)))
