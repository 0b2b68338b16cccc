"""Frames of several codes and right context as property tests, on a codec of integers.

`FrameDecoder` depends on two frames to each side and computes with small integers, which are exact
in float32: streamed and whole audio are either equal bit for bit or different.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import AttentionKind, AudioDecoder, CodecSpec, DecodeWindow, StreamingOptions
from tests.decoder.small_codecs import audio_of
from tests.decoder.toys import cut, windows_of

LAYOUT = (0, 1, 1)
CODEBOOK = 16
REACH = 2  # frames
TAPS = (1, 3, 7, 5, 2)
WEIGHTS = (1, 16, 5)  # weight of a code by its index, so that the order of codes matters


class FrameDecoder(AudioDecoder):
    """Each frame is a number; its samples depend on five neighbouring ones."""

    def __init__(self, hop: Fraction) -> None:
        self.spec = CodecSpec(
            "frames",
            sample_rate=1000,
            samples_per_code=hop / len(LAYOUT),
            codebook_size=CODEBOOK,
            layout=LAYOUT,
            receptive_field=REACH * len(LAYOUT),
            right_field=REACH * len(LAYOUT),
            attention=AttentionKind.NONE,
        )

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._row(window) for window in windows]))

    def _row(self, window: DecodeWindow) -> np.ndarray:
        numbers = np.array(window.codes).reshape(-1, len(LAYOUT)) @ np.array(WEIGHTS)
        mixed = np.convolve(np.pad(numbers, REACH), TAPS, mode="valid")
        first = window.positions[0] // len(LAYOUT)
        starts = [self._start(first + frame) for frame in range(len(mixed) + 1)]
        return np.repeat(mixed, np.diff(starts)).astype(np.float32)[window.skip_samples :]

    def _start(self, frame: int) -> int:
        return frame * self.spec.samples_per_frame // 1


DECODERS = (FrameDecoder(Fraction(6)), FrameDecoder(Fraction(25, 2)))

decoders = st.sampled_from(DECODERS)
frames = st.lists(st.integers(0, CODEBOOK - 1), min_size=3, max_size=72).map(
    lambda codes: codes[: len(codes) // 3 * 3]
)
sizes = st.lists(st.integers(1, 6).map(lambda n: 3 * n), min_size=1, max_size=4).map(tuple)
contexts = st.integers(0, 8).map(lambda n: 3 * n)


@settings(max_examples=100)
@given(decoders, frames, sizes, contexts, contexts)
def test_enough_context_to_both_sides_is_the_whole(decoder, codes, sizes, left, right) -> None:
    field = decoder.spec.receptive_field
    options = StreamingOptions(sizes, buffer=field + left, look_ahead=field + right)
    assert np.array_equal(audio_of(decoder, codes, options), audio_of(decoder, codes))


@settings(max_examples=60)
@given(decoders, frames, sizes, contexts)
def test_hasty_blocks_are_wrong_at_their_ends_only(decoder, codes, sizes, first) -> None:
    """Until the look-ahead has grown to the required one."""
    field = decoder.spec.receptive_field
    options = StreamingOptions(
        sizes, buffer=field, look_ahead=field, first_look_ahead=min(first, field)
    )
    whole, got = audio_of(decoder, codes), audio_of(decoder, codes, options)
    frames = min(sizes[0], len(codes)) // len(LAYOUT)
    hop = decoder.spec.samples_per_frame
    right = (frames - REACH) * hop // 1
    assert np.array_equal(got[: max(right, 0)], whole[: max(right, 0)])
    settled = next(n for n in range(4 * field + 1) if options.look_ahead_of(n) == field)
    start = sum(sizes[min(n, len(sizes) - 1)] for n in range(settled)) // len(LAYOUT) * hop // 1
    assert np.array_equal(got[start:], whole[start:])


@settings(max_examples=100)
@given(decoders, frames, sizes, contexts, contexts)
def test_no_sample_is_lost_or_doubled(decoder, codes, sizes, buffer, look_ahead) -> None:
    options = StreamingOptions(sizes, buffer=buffer, look_ahead=look_ahead)
    windows = windows_of(decoder.spec, options, codes)
    ends = [window.first_sample + window.num_samples for window in windows]
    assert [window.first_sample for window in windows] == [0, *ends[:-1]]
    assert ends[-1] == len(codes) * decoder.spec.samples_per_code // 1
    assert len(audio_of(decoder, codes, options)) == ends[-1]


@settings(max_examples=100)
@given(frames, sizes, contexts, contexts)
def test_a_window_is_a_stretch_of_the_stream(codes, sizes, buffer, look_ahead) -> None:
    options = StreamingOptions(sizes, buffer=buffer, look_ahead=look_ahead)
    blocks = cut(codes, sizes, look_ahead)
    numbers = [block.number for block in blocks for _ in block.codes]
    start = 0
    for block, window in zip(blocks, windows_of(DECODERS[0].spec, options, codes), strict=True):
        end = start + len(block.codes)
        first, last = window.positions[0], window.positions[-1] + 1
        assert window.codes == tuple(codes[first:last])
        assert first == max(start - buffer, 0)
        assert last == min(end + look_ahead, len(codes))
        assert window.future_len == last - end
        assert list(window.block_ids[-(last - start) :]) == numbers[start:last]
        start = end


@settings(max_examples=60)
@given(decoders, frames, sizes, st.data())
def test_a_carried_stream_continues_with_its_left_context(decoder, codes, sizes, data) -> None:
    """A stream in two requests differs only where the first one ended, without right context."""
    field = decoder.spec.receptive_field
    at = 3 * data.draw(st.integers(0, len(codes) // 3 - 1))
    options = StreamingOptions(sizes, buffer=field, look_ahead=field)
    rest = audio_of(
        decoder, codes[at:], options, carry=codes[max(at - field, 0) : at], token_offset=at
    )
    whole = audio_of(decoder, codes)
    assert np.array_equal(rest, whole[len(whole) - len(rest) :])
