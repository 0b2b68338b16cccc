"""Streaming sample-rate conversion (soxr), independent of the division of the input."""

from __future__ import annotations

import numpy as np
import soxr

QUALITY = "HQ"


class Resampler:
    """Converts mono float32 from one rate to another. Equal rates pass through bit for bit.

    In total it emits floor(num_in * to_rate / from_rate + 1/2) samples, the last ones in `finish`.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        self._stream = None
        if from_rate != to_rate:
            self._stream = soxr.ResampleStream(
                from_rate, to_rate, 1, dtype="float32", quality=QUALITY
            )

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Convert float32 [S]; return the samples that are ready (possibly none)."""
        if self._stream is None:
            return samples
        chunk = np.ascontiguousarray(samples, dtype=np.float32)
        return np.asarray(self._stream.resample_chunk(chunk), dtype=np.float32)

    def finish(self) -> np.ndarray:
        """Return the delayed samples; afterwards the resampler can be used again."""
        nothing = np.zeros(0, dtype=np.float32)
        if self._stream is None:
            return nothing
        tail = np.asarray(self._stream.resample_chunk(nothing, last=True), dtype=np.float32)
        self._stream.clear()
        return tail


def resample(samples: np.ndarray, from_rate: int, to_rate: int) -> np.ndarray:
    """Convert a whole mono clip, float32 [S], to another rate."""
    resampler = Resampler(from_rate, to_rate)
    return np.concatenate([resampler.process(samples), resampler.finish()])
