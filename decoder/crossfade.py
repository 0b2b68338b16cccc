"""Crossfade between blocks: its length, and the blend on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from decoder.base import CodecSpec, DecoderOptions, DecodeWindow, StreamState

if TYPE_CHECKING:
    import numpy as np


class OutputRow(NamedTuple):
    """The use of a rendered row: number of samples, samples after them for the crossfade, state."""

    num_samples: int
    tail_size: int
    state: StreamState


def crossfade_samples(spec: CodecSpec, options: DecoderOptions) -> int:
    """Return the length of `crossfade_ms` in samples."""
    return round((options.crossfade_ms or 0.0) * spec.sample_rate / 1000)


def blend(block: np.ndarray, tail: np.ndarray | None) -> None:
    """Blend in place, linearly, from the previous block's rendering of these samples to this
    one's.
    """
    if tail is None or not len(tail):
        return
    import numpy as np

    size = min(len(tail), len(block))
    rising = ((np.arange(size) + 0.5) / len(tail)).astype(np.float32)
    block[:size] = tail[:size] * (1 - rising) + block[:size] * rising


def tail_size(spec: CodecSpec, window: DecodeWindow, fade: int) -> int:
    """Return how many samples after its block a window renders for the crossfade with the next
    one.
    """
    if not window.future_len:
        return 0
    ratio = spec.samples_per_code
    return min(fade, window.future_len * ratio.numerator // ratio.denominator)
