"""Watermark of a stream: a function that marks whole clips, applied block by block.

    earlier samples │ block │ mirrored samples      one clip for the function
        `PAST_S`       └──────── `AHEAD_S`

The function's change of this clip is added to the block, so every sample leaves at once. The change
is continuous over the joint of two blocks: it begins as the continuation of the earlier block's
change into its mirrored samples, and becomes the block's own within `FADE_S`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from decoder.pcm.resampling import resample

PAST_S = 0.3
AHEAD_S = 0.1
FADE_S = 0.01


@dataclass(frozen=True, slots=True)
class Watermark:
    """A function that marks whole clips: float32 [S] at `sample_rate` in Hz, in and out.

    Its result may lack up to 10 ms at the end. `PAST_S` is more than it depends on before a sample.
    """

    apply: Callable[[np.ndarray], np.ndarray]
    sample_rate: int


class StreamMarker:
    """Marks mono float32. Delays nothing; the result depends on the division of the input."""

    def __init__(self, watermark: Watermark, sample_rate: int) -> None:
        self._watermark, self._rate = watermark, sample_rate
        self._past = np.zeros(round(PAST_S * sample_rate), dtype=np.float32)
        self._ahead = round(AHEAD_S * sample_rate)
        # The earlier block's change after its end.
        self._expected = np.zeros(max(1, round(FADE_S * sample_rate)), dtype=np.float32)
        num_faded = len(self._expected)
        self._weights = np.arange(1, num_faded + 1, dtype=np.float32) / (num_faded + 1)

    def process(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 [S] with the watermark."""
        if not len(samples):
            return samples
        clip = np.concatenate([self._past, samples])
        change = self._change(np.pad(clip, (0, self._ahead), mode="reflect"))
        start, end, num_faded = len(self._past), len(clip), len(self._weights)
        fading = change[start : start + num_faded]  # a view: a short block may end within it
        fading += (1 - self._weights) * (self._expected - fading)
        self._expected = change[end : end + num_faded]
        self._past = clip[-start:]
        return samples + change[start:end]

    def _change(self, clip: np.ndarray) -> np.ndarray:
        """Return what the watermark adds to a clip, without the end that it lacks."""
        rate = self._watermark.sample_rate
        plain = resample(clip, self._rate, rate)
        marked = self._watermark.apply(plain)
        return resample(marked - plain[: len(marked)], rate, self._rate)
