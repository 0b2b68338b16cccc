"""Batching of windows of many streams: groups, and bit-identical samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import (
    CodecSpec,
    DecodeRequest,
    DecoderOptions,
    DecodeWindow,
    MaskPolicy,
    StreamingOptions,
    StreamState,
    create_decoder,
    render,
)
from decoder.batching import group_windows
from decoder.codecs.embedded.modules import CodecConfig
from decoder.codecs.ramp import RampDecoder
from tests.decoder.small_codecs import (
    random_codes,
    write_dac,
    write_mimi,
    write_neucodec,
    write_qwen3_tts_codec,
    write_snac,
    write_xcodec2,
)
from tests.decoder.toys import SMALL, build_embedded, windows_of

RAMP = RampDecoder(CodecSpec("ramp", 1000, Fraction(10), codebook_size=64, receptive_field=0))
BLOCK_MASKS = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)


def windows(num_codes: int, sizes: tuple[int, ...], buffer: int = 2) -> list[DecodeWindow]:
    return windows_of(RAMP.spec, StreamingOptions(sizes, buffer), range(num_codes))


class CountingDecoder(RampDecoder):
    """A ramp codec that records the shapes of its calls."""

    def __init__(self, max_batch: int) -> None:
        super().__init__(RAMP.spec, DecoderOptions(max_batch=max_batch))
        self.calls: list[list[tuple[int, int, int]]] = []

    def decode(self, windows: Sequence[DecodeWindow]) -> torch.Tensor:
        self.calls.append([window.shape for window in windows])
        return super().decode(windows)


class CountingStreams(CountingDecoder):
    """The same with a state: the number of a stream's blocks so far."""

    def __init__(self, max_batch: int) -> None:
        super().__init__(max_batch)
        self.spec = replace(self.spec, keeps_state=True)
        self.states: list[list[object]] = []

    def decode_next(
        self, windows: Sequence[DecodeWindow], kept: Sequence[object]
    ) -> tuple[torch.Tensor, list[object]]:
        self.states.append(list(kept))
        following = [1 + state if isinstance(state, int) else 1 for state in kept]
        return self.decode(windows), [*following]


def test_streams_with_a_state_share_calls_and_keep_their_order() -> None:
    decoder, first, second = CountingStreams(max_batch=8), StreamState(), StreamState()
    one, two = windows(9, (2, 3))[:2], windows(9, (3,))[:2]
    ready = [DecodeRequest(window, first) for window in two]
    ready += [DecodeRequest(window, second) for window in one]
    audio = render(decoder, ready)
    assert decoder.calls == [[two[0].shape], [one[0].shape], [two[1].shape, one[1].shape]]
    assert decoder.states == [[None], [None], [1, 1]]
    assert (first.kept, second.kept) == (2, 2)
    alone = [RAMP.decode([item.window])[0].numpy() for item in ready]
    assert all(np.array_equal(x, y) for x, y in zip(audio, alone, strict=True))


def test_like_shapes_share_a_call_of_bounded_size() -> None:
    decoder = CountingDecoder(max_batch=3)
    four, five = windows(4, (4,))[0], windows(5, (5,))[0]
    ready = [DecodeRequest(w) for w in [four, five, four, four, five, four]]
    assert group_windows(decoder, ready) == [[0, 2, 3], [1, 4], [5]]
    assert group_windows(CountingDecoder(max_batch=1), ready) == [[0], [1], [2], [3], [4], [5]]
    assert [len(samples) for samples in render(decoder, ready)] == [40, 50, 40, 40, 50, 40]
    assert decoder.calls == [[(4, 0, 0, 0)] * 3, [(5, 0, 0, 0)] * 2, [(4, 0, 0, 0)]]


def test_windows_of_a_stream_are_rendered_in_its_order() -> None:
    """A GPU blends them in the order of the calls, in which other streams' windows take part."""
    decoder, first, second = CountingDecoder(max_batch=2), StreamState(), StreamState()
    mixed, even = windows(14, (4, 5, 4, 1), buffer=0), windows(12, (4,), buffer=0)
    ready = [DecodeRequest(window, first) for window in mixed]
    ready += [DecodeRequest(window, second) for window in even]
    four, five, one = (shape_of(count) for count in (4, 5, 1))
    render(decoder, ready)
    assert decoder.calls == [[four] * 2, [four] * 2, [five], [four], [one]]
    decoder.calls.clear()
    render(decoder, [replace(item, state=StreamState()) for item in ready])
    assert decoder.calls == [[four] * 2, [five], [one], [four] * 2, [four]]


def shape_of(count: int) -> tuple[int, int, int, int]:
    return (count, 0, 0, 0)


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=8)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=100)
@given(lengths, sizes, st.integers(0, 6), st.integers(1, 4), st.randoms())
def test_samples_are_returned_in_the_order_of_their_windows(
    lengths, sizes, buffer, max_batch, random
) -> None:
    ready = [DecodeRequest(window) for n in lengths for window in windows(n, sizes, buffer)]
    random.shuffle(ready)
    decoder = CountingDecoder(max_batch)
    for item, samples in zip(ready, render(decoder, ready), strict=True):
        alone = RAMP.decode([item.window])[0].numpy()
        assert np.array_equal(samples, alone)
    assert all(len(set(call)) == 1 and len(call) <= max_batch for call in decoder.calls)
    assert sum(map(len, decoder.calls)) == len(ready)


def test_render_cuts_what_is_emitted() -> None:
    first, second = windows(7, (4, 3))
    assert [len(x) for x in render(RAMP, [DecodeRequest(first)])] == [40]
    samples = render(RAMP, [DecodeRequest(second)])[0]
    whole = RAMP.decode([windows(7, (7,))[0]])[0].numpy()
    assert np.array_equal(samples, whole[40:])
    assert samples.dtype == np.float32
    assert render(RAMP, []) == []


@pytest.mark.parametrize("num_streams", [2, 3, 8])
@pytest.mark.parametrize("config", [SMALL, CodecConfig(decoder_layers=1)], ids=["small", "wide"])
def test_a_batch_is_its_windows_alone_bit_for_bit(config: CodecConfig, num_streams: int) -> None:
    decoder = build_embedded(config)
    rng = np.random.default_rng(num_streams)
    options = StreamingOptions((3, 12, 25), 25, BLOCK_MASKS)
    streams = [
        windows_of(decoder.spec, options, rng.integers(0, decoder.spec.codebook_size, 40).tolist())
        for _ in range(num_streams)
    ]
    for block in zip(*streams, strict=True):
        alone = [decoder.decode([window])[0] for window in block]
        together = decoder.decode(block)
        assert all(a.equal(b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "write",
    [write_snac, write_dac, write_mimi, write_qwen3_tts_codec, write_xcodec2, write_neucodec],
)
def test_published_codecs_render_a_window_alone_and_in_a_batch_alike(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path)
    decoder = create_decoder(tmp_path, allow_pickle=True)
    streams = [
        windows_of(decoder.spec, decoder.spec.recommended, random_codes(decoder, 30 + seed, seed))
        for seed in range(3)
    ]
    windows = [window for stream in streams for window in stream]
    alone = [render(decoder, [DecodeRequest(window)])[0] for window in windows]
    together = render(decoder, [DecodeRequest(window) for window in windows])
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_windows_of_one_shape_may_have_different_masks() -> None:
    """Their histories have equal lengths but different borders."""
    decoder = build_embedded(SMALL)
    rng = np.random.default_rng(7)
    codes = [rng.integers(0, 64, 12).tolist() for _ in range(2)]
    left = windows_of(decoder.spec, StreamingOptions((2, 6, 4), 8, BLOCK_MASKS), codes[0])[-1]
    right = windows_of(decoder.spec, StreamingOptions((5, 3, 4), 8, BLOCK_MASKS), codes[1])[-1]
    assert left.shape == right.shape
    assert left.block_ids != right.block_ids
    alone = [decoder.decode([window])[0] for window in (left, right)]
    together = decoder.decode([left, right])
    assert all(a.equal(b) for a, b in zip(alone, together, strict=True))
