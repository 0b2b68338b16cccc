"""Invariants of streaming as property tests, on real small decoders."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoder import (
    AudioDecoder,
    CodecSpec,
    DecodeRequest,
    DecoderStream,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    render,
)
from decoder.codecs.ramp import RampDecoder
from tests.decoder.toys import (
    CAUSAL,
    SMALL,
    TOLERANCE,
    CachedEmbedded,
    ConvDecoder,
    build_embedded,
    cut,
    one_shot_audio,
    stream_audio,
    windows_of,
)

NEVER = PrependPromptSpeechTokens.NEVER
ONCE = PrependPromptSpeechTokens.ONCE
ROLLING = PrependPromptSpeechTokens.ROLLING
BLOCK_MASKS = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)

CODEBOOK = 64
RAMP = RampDecoder(
    CodecSpec("ramp", 44_100, Fraction(44_100, 86), codebook_size=CODEBOOK, receptive_field=0)
)
CONV = ConvDecoder()
CAUSAL_ATTENTION = build_embedded(CAUSAL)
BIDIRECTIONAL = build_embedded(SMALL)
TOKEN_CAUSAL = pytest.mark.parametrize(
    "decoder", [CONV, CAUSAL_ATTENTION], ids=["convolutions", "attention"]
)

codes = st.lists(st.integers(0, CODEBOOK - 1), max_size=40).map(tuple)
some_codes = st.lists(st.integers(0, CODEBOOK - 1), min_size=1, max_size=40).map(tuple)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
any_sizes = st.none() | sizes
buffers = st.integers(0, 12)
modes = st.sampled_from(PrependPromptSpeechTokens)
carries = st.none() | st.lists(st.integers(0, CODEBOOK - 1), max_size=15).map(tuple)


def at_least(count: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, CODEBOOK - 1), min_size=count, max_size=count + 30).map(tuple)


light = settings(max_examples=60)
heavy = settings(max_examples=25)


def reach(decoder: AudioDecoder) -> int:
    assert decoder.spec.receptive_field is not None
    return decoder.spec.receptive_field


def same(left: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> bool:
    return np.allclose(left, right, rtol=0, atol=TOLERANCE)


@light
@given(codes, any_sizes, buffers, modes, codes, carries)
def test_blocks_cover_the_codes_exactly(s, k, b, mode, p, c) -> None:
    windows = windows_of(
        RAMP.spec, StreamingOptions(k, b, prepend=mode), s, prompt_codes=p, carry=c
    )
    current = [w.codes[w.prompt_len + w.history_len :] for w in windows]
    assert sum(current, ()) == s


@light
@given(codes, any_sizes, buffers, modes, codes, carries)
def test_samples_are_contiguous_and_complete(s, k, b, mode, p, c) -> None:
    options = StreamingOptions(k, b, prepend=mode)
    windows = windows_of(RAMP.spec, options, s, prompt_codes=p, carry=c)
    end = 0
    for window in windows:
        assert window.first_sample == end
        end += window.num_samples
    assert end == len(s) * 44_100 // 86
    blocks = stream_audio(RAMP, options, s, prompt_codes=p, carry=c)
    assert [len(block) for block in blocks] == [w.num_samples for w in windows]


@light
@given(some_codes, sizes, buffers, codes, carries)
def test_windows_are_bounded(s, k, b, p, c) -> None:
    for mode in PrependPromptSpeechTokens:
        options = StreamingOptions(k, b, prepend=mode)
        windows = windows_of(RAMP.spec, options, s, prompt_codes=p, carry=c)
        assert all(w.history_len <= b for w in windows)
    past = len(c or ())
    for i, window in enumerate(windows):  # of the last mode, rolling
        if i > 0 or c is not None:
            assert window.prompt_len + window.history_len == min(b, len(p) + past)
        past += len(window.codes) - window.prompt_len - window.history_len


@heavy
@given(st.lists(some_codes, min_size=2, max_size=6), sizes, buffers)
def test_audio_does_not_depend_on_other_streams_of_a_batch(streams, k, b) -> None:
    options = StreamingOptions(k, b, BLOCK_MASKS)
    ready = [
        DecodeRequest(window)
        for s in streams
        for window in windows_of(BIDIRECTIONAL.spec, options, s)
    ]
    together = render(BIDIRECTIONAL, ready)
    alone = [block for s in streams for block in stream_audio(BIDIRECTIONAL, options, s)]
    assert all(np.array_equal(x, y) for x, y in zip(alone, together, strict=True))


@TOKEN_CAUSAL
@heavy
@given(s=some_codes, k=sizes, extra=st.integers(0, 3))
def test_streamed_audio_of_a_causal_decoder_equals_the_whole(decoder, s, k, extra) -> None:
    options = StreamingOptions(k, reach(decoder) + extra)
    streamed = np.concatenate(stream_audio(decoder, options, s))
    assert same(streamed, one_shot_audio(decoder, s))


@TOKEN_CAUSAL
def test_a_buffer_of_one_code_less_changes_samples(decoder) -> None:
    s = tuple(np.random.default_rng(1).integers(0, CODEBOOK, 40).tolist())
    short = stream_audio(decoder, StreamingOptions((3,), reach(decoder) - 1), s)
    assert not same(np.concatenate(short), one_shot_audio(decoder, s))


@TOKEN_CAUSAL
@heavy
@given(s=some_codes, k=sizes, p=codes, extra=st.integers(0, 3))
def test_mode_rolling_equals_the_whole_with_its_prompt(decoder, s, k, p, extra) -> None:
    options = StreamingOptions(k, reach(decoder) + extra, prepend=ROLLING)
    streamed = np.concatenate(stream_audio(decoder, options, s, prompt_codes=p))
    assert same(streamed, one_shot_audio(decoder, s, prompt=p))


@TOKEN_CAUSAL
@heavy
@given(s=some_codes, p=codes, extra=st.integers(0, 3), data=st.data())
def test_mode_once_equals_the_whole_when_the_first_block_is_long_enough(
    decoder, s, p, extra, data
) -> None:
    first = data.draw(st.integers(reach(decoder), reach(decoder) + 4))
    options = StreamingOptions((first, 3), reach(decoder) + extra, prepend=ONCE)
    streamed = np.concatenate(stream_audio(decoder, options, s, prompt_codes=p))
    assert same(streamed, one_shot_audio(decoder, s, prompt=p))


@TOKEN_CAUSAL
@pytest.mark.parametrize("buffer", [10, 1000])
def test_mode_once_with_a_short_first_block_differs_for_any_buffer(decoder, buffer) -> None:
    rng = np.random.default_rng(2)
    s, p = (tuple(rng.integers(0, CODEBOOK, n).tolist()) for n in (20, 12))
    options = StreamingOptions((reach(decoder) - 1, 4), buffer, prepend=ONCE)
    streamed = stream_audio(decoder, options, s, prompt_codes=p)
    whole = one_shot_audio(decoder, s, prompt=p)
    assert same(streamed[0], whole[: len(streamed[0])])
    assert not same(np.concatenate(streamed), whole)


def test_streamed_audio_of_a_bidirectional_decoder_differs_from_the_whole() -> None:
    s = tuple(np.random.default_rng(3).integers(0, CODEBOOK, 30).tolist())
    streamed = stream_audio(BIDIRECTIONAL, StreamingOptions((4,), len(s)), s)
    assert not same(np.concatenate(streamed), one_shot_audio(BIDIRECTIONAL, s))


@heavy
@given(some_codes, sizes, codes, st.integers(0, 3))
def test_a_bidirectional_decoder_with_block_masks_streams_exactly(s, k, p, extra) -> None:
    decoder = BIDIRECTIONAL
    options = StreamingOptions(k, reach(decoder) + extra, BLOCK_MASKS, ROLLING)
    streamed = np.concatenate(stream_audio(decoder, options, s, prompt_codes=p))
    whole = one_shot_audio(decoder, s, sizes=k, prompt=p, masks=BLOCK_MASKS)
    assert same(streamed, whole)


def test_a_prompt_without_its_mask_leaks_the_current_block() -> None:
    rng = np.random.default_rng(4)
    s, p = (tuple(rng.integers(0, CODEBOOK, n).tolist()) for n in (20, 12))
    leaky = MaskPolicy(block_causal=True)
    options = StreamingOptions((1, 3), 40, leaky, ROLLING)
    streamed = np.concatenate(stream_audio(BIDIRECTIONAL, options, s, prompt_codes=p))
    whole = one_shot_audio(BIDIRECTIONAL, s, sizes=(1, 3), prompt=p, masks=leaky)
    assert not same(streamed, whole)


@light
@given(sizes, buffers, modes, codes, st.data())
def test_a_split_stream_keeps_its_left_context(k, b, mode, p, data) -> None:
    options = StreamingOptions(k, b, prepend=mode)
    s = data.draw(at_least(k[0] + 1))
    blocks = cut(s, k)
    at = data.draw(st.integers(1, len(blocks) - 1))
    whole = DecoderStream(RAMP.spec, options, prompt_codes=p)
    for block in blocks[:at]:
        whole.push(block.codes)
    assert whole.carry == (s[: whole.num_codes][-b:] if b else ())
    rest = s[whole.num_codes :]
    later = DecoderStream(
        RAMP.spec,
        options,
        prompt_codes=p,
        carry=whole.carry,
        token_offset=whole.next_token_offset,
    )
    following = [*later.push(rest), *later.finish()][0]
    context = following.prompt_len + following.history_len
    expected = (whole.push(blocks[at].codes) or whole.finish())[0]
    assert following.codes[:context] == expected.codes[: expected.prompt_len + expected.history_len]
    assert following.positions[:context] == expected.positions[:context]


@heavy
@given(some_codes, sizes, st.integers(0, 3))
def test_the_state_of_convolutions_equals_recomputing_the_window(s, k, extra) -> None:
    streamed = stream_audio(CONV, StreamingOptions(k, reach(CONV) + extra), s)
    state = CONV.fresh_state()
    for chunk, window_samples in zip(cut(s, k), streamed, strict=True):
        samples, state = CONV.step(state, chunk.codes)
        assert same(samples[0].numpy(), window_samples)


@pytest.mark.parametrize(
    ("decoder", "masks"), [(CAUSAL_ATTENTION, MaskPolicy()), (BIDIRECTIONAL, BLOCK_MASKS)]
)
@heavy
@given(s=some_codes, k=sizes, extra=st.integers(0, 3))
def test_cached_attention_equals_recomputing_the_window(decoder, masks, s, k, extra) -> None:
    streamed = stream_audio(decoder, StreamingOptions(k, reach(decoder) + extra, masks), s)
    cached = CachedEmbedded(decoder)
    for chunk, window_samples in zip(cut(s, k), streamed, strict=True):
        assert same(cached.step(chunk.codes), window_samples)


@light
@given(codes, any_sizes, buffers, modes, codes, codes)
def test_the_prompt_does_not_change_the_number_of_samples(s, k, b, mode, p, other) -> None:
    options = StreamingOptions(k, b, prepend=mode)
    left = windows_of(RAMP.spec, options, s, prompt_codes=p)
    right = windows_of(RAMP.spec, options, s, prompt_codes=other)
    emitted = [[(w.first_sample, w.num_samples) for w in windows] for windows in (left, right)]
    assert emitted[0] == emitted[1]


@light
@given(sizes, buffers, modes, codes, st.data())
def test_the_first_audio_only_needs_the_first_block(k, b, mode, p, data) -> None:
    """Its samples are final: later codes do not change or delay them."""
    s = data.draw(at_least(k[0]))
    options = StreamingOptions(k, b, prepend=mode)
    first = stream_audio(RAMP, options, s[: k[0]], prompt_codes=p)[0]
    assert len(first) == k[0] * 44_100 // 86
    assert np.array_equal(first, stream_audio(RAMP, options, s, prompt_codes=p)[0])


@pytest.mark.parametrize("decoder", [CONV, CAUSAL_ATTENTION, BIDIRECTIONAL])
def test_the_receptive_field_is_measured(decoder) -> None:
    """The code R positions before a block affects it, the one before that does not."""
    field = reach(decoder)
    s = list(np.random.default_rng(5).integers(0, CODEBOOK, 3 * field + 8).tolist())
    start = 2 * field + 4  # start of the last block
    masks = BLOCK_MASKS if decoder is BIDIRECTIONAL else MaskPolicy()

    def last_block() -> np.ndarray:
        options = StreamingOptions((start, len(s)), start, masks)
        return stream_audio(decoder, options, s)[1]

    before = last_block()
    s[start - field - 1] = (s[start - field - 1] + 17) % CODEBOOK
    assert np.array_equal(before, last_block())
    s[start - field] = (s[start - field] + 17) % CODEBOOK
    assert not np.array_equal(before, last_block())
