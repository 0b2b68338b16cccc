"""Watermarks block by block, with functions whose effect on a whole clip is known."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoder import StreamMarker, Watermark

RATE = 16_000
FADE = 160  # samples
MARK_RATE = 32_000
RNG = np.random.default_rng(3)


def smooth_noise(seconds: float, rate: int = RATE) -> np.ndarray:
    """Noise well below the rate's limit, so that resampling keeps it; it fades in."""
    spectrum = np.fft.rfft(RNG.standard_normal(round(seconds * rate)))
    spectrum[np.arange(len(spectrum)) / seconds > 2_500] = 0
    samples = np.fft.irfft(spectrum, round(seconds * rate))
    rising = np.hanning(rate // 5)[: rate // 10]
    samples[: len(rising)] *= rising
    return (0.2 * samples / samples.std()).astype(np.float32)


def echo(clip: np.ndarray) -> np.ndarray:
    """Add what was 0.2 s before, in whole hops of 10 ms as a network does."""
    clip = clip[: len(clip) // 320 * 320]
    delay = round(0.2 * MARK_RATE)
    return clip + 0.5 * np.concatenate([np.zeros(delay, np.float32), clip[:-delay]])


def streamed(
    samples: np.ndarray, sizes: list[int], apply: Callable[..., np.ndarray], rate: int = RATE
) -> np.ndarray:
    marker = StreamMarker(Watermark(apply, MARK_RATE), rate)
    blocks = np.split(samples, np.cumsum(sizes)[np.cumsum(sizes) < len(samples)])
    marked = [marker.process(block) for block in blocks]
    assert [len(block) for block in marked] == [len(block) for block in blocks]
    assert {block.dtype for block in marked} == {np.dtype(np.float32)}
    return np.concatenate(marked)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 48_000])
def test_what_depends_on_the_past_alone_is_as_of_the_whole_clip(rate: int) -> None:
    samples = smooth_noise(2.0, rate)
    delay = round(0.2 * rate)
    whole = samples + 0.5 * np.concatenate([np.zeros(delay, np.float32), samples[:-delay]])
    found = streamed(samples, [rate // 5, rate // 2, 7, rate // 2], echo, rate)
    assert np.abs(found - whole).max() < 2e-3


@given(sizes=st.lists(st.integers(1, 4_000), min_size=3, max_size=8))
@example([153, 1, 6, 1, 1])
@settings(max_examples=30, deadline=None)
def test_the_change_is_continuous_over_joints(sizes: list[int]) -> None:
    """Even if each call of the function changes its clip in another way."""
    levels = cycle([0.1, -0.1, 0.05])
    samples = smooth_noise(1.0)[: sum(sizes)]
    found = streamed(samples, sizes, lambda clip: clip + np.float32(next(levels)))
    steps = np.abs(np.diff(found - samples))
    # Levels differ by at most 0.2, which fades over FADE samples; fades that overlap add up.
    starts = np.cumsum([0, *sizes[:-1]])
    overlapping = max(int(((start - FADE < starts) & (starts <= start)).sum()) for start in starts)
    assert steps.max() < max(2, overlapping) * 0.2 / FADE


def test_only_the_change_is_resampled() -> None:
    samples = RNG.standard_normal(RATE).astype(np.float32)  # up to the limit of the rate
    np.testing.assert_array_equal(streamed(samples, [3_000, 5_000], lambda clip: clip), samples)


def test_no_samples_give_none_and_change_nothing() -> None:
    samples = smooth_noise(1.0)
    plain = streamed(samples, [5_000, 5_000], echo)
    np.testing.assert_array_equal(streamed(samples, [5_000, 0, 5_000], echo), plain)
