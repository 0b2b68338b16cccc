"""Masks, sample grid and carry, with literal values."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from decoder import (
    AttentionKind,
    CodecSpec,
    CodeRangeError,
    DecoderConfigError,
    DecoderStream,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    attention_mask,
    sample_index,
)
from tests.decoder.toys import windows_of

SPEC = CodecSpec(
    "toy", sample_rate=1000, samples_per_code=Fraction(10), codebook_size=64, receptive_field=5
)
RATIONAL = replace(SPEC, sample_rate=44_100, samples_per_code=Fraction(44_100, 86))
CODES = tuple(range(11))
SIZES = (2, 3, 4)

NEVER = PrependPromptSpeechTokens.NEVER
ONCE = PrependPromptSpeechTokens.ONCE
ROLLING = PrependPromptSpeechTokens.ROLLING


def picture(mask: np.ndarray) -> list[str]:
    return ["".join("1" if allowed else "." for allowed in row) for row in mask]


def rolling_block_1(
    *, block_causal: bool, prepend_prompt_speech_tokens_causal: bool, kind: AttentionKind
) -> list[str]:
    """Return the mask of [p1 p2 | s0 s1 | s2 s3 s4]."""
    masks = MaskPolicy(block_causal, prepend_prompt_speech_tokens_causal)
    options = StreamingOptions(SIZES, 4, masks, ROLLING)
    window = windows_of(SPEC, options, CODES, prompt_codes=(20, 21, 22))[1]
    assert window.codes == (21, 22, 0, 1, 2, 3, 4)
    return picture(attention_mask(window, kind))


ALL = ["1111111"] * 3


@pytest.mark.parametrize(
    ("block_causal", "prepend_prompt_speech_tokens_causal", "earlier_rows"),
    [
        (False, False, ["1111111", "1111111", "1111111", "1111111"]),
        (True, True, ["11.....", "11.....", "1111...", "1111..."]),
        (True, False, ["1111111", "1111111", "1111...", "1111..."]),
        (False, True, ["11.....", "11.....", "1111111", "1111111"]),
    ],
)
def test_masks_of_a_bidirectional_decoder(
    block_causal: bool, prepend_prompt_speech_tokens_causal: bool, earlier_rows: list[str]
) -> None:
    mask = rolling_block_1(
        block_causal=block_causal,
        prepend_prompt_speech_tokens_causal=prepend_prompt_speech_tokens_causal,
        kind=AttentionKind.BIDIRECTIONAL,
    )
    assert mask == earlier_rows + ALL


@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.parametrize("prepend_prompt_speech_tokens_causal", [False, True])
def test_a_token_causal_decoder_is_already_stricter(
    block_causal: bool, prepend_prompt_speech_tokens_causal: bool
) -> None:
    mask = rolling_block_1(
        block_causal=block_causal,
        prepend_prompt_speech_tokens_causal=prepend_prompt_speech_tokens_causal,
        kind=AttentionKind.CAUSAL,
    )
    assert mask == ["1......", "11.....", "111....", "1111...", "11111..", "111111.", "1111111"]


def test_history_that_spans_blocks_is_cut_at_their_borders() -> None:
    masks = MaskPolicy(block_causal=True)
    window = windows_of(SPEC, StreamingOptions(SIZES, 5, masks), CODES)[2]
    assert picture(attention_mask(window, AttentionKind.BIDIRECTIONAL)) == (
        ["11......."] * 2 + ["11111...."] * 3 + ["111111111"] * 4
    )


def test_every_code_has_the_block_it_came_from() -> None:
    """Prompt codes are in a block before all others, carried ones in one before the stream's."""
    options = StreamingOptions(SIZES, 4, prepend=ROLLING)
    windows = windows_of(SPEC, options, CODES, prompt_codes=(20, 21, 22), carry=(40,))
    assert [w.block_ids for w in windows[:3]] == [
        (-2, -2, -2, -1, 0, 0),
        (-2, -1, 0, 0, 1, 1, 1),
        (0, 1, 1, 1, 2, 2, 2, 2),
    ]


def test_carried_codes_are_one_earlier_block() -> None:
    masks = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    options = StreamingOptions(SIZES, 3, masks)
    window = windows_of(SPEC, options, CODES, carry=(40, 41))[1]
    assert window.codes == (41, 0, 1, 2, 3, 4)
    assert picture(attention_mask(window, AttentionKind.BIDIRECTIONAL)) == (
        ["1....."] + ["111..."] * 2 + ["111111"] * 3
    )


@pytest.mark.parametrize("buffer", [0, 4])
def test_masks_have_no_effect_without_the_codes_they_apply_to(buffer: int) -> None:
    """block_causal needs a buffer, prepend_prompt_speech_tokens_causal a prompt."""
    masks = MaskPolicy(block_causal=buffer == 0, prepend_prompt_speech_tokens_causal=True)
    for window in windows_of(SPEC, StreamingOptions(SIZES, buffer, masks, NEVER), CODES):
        assert attention_mask(window, AttentionKind.BIDIRECTIONAL).all()


def test_a_decoder_without_attention_has_no_mask() -> None:
    window = windows_of(SPEC, StreamingOptions(), CODES)[0]
    with pytest.raises(DecoderConfigError, match="cannot apply masks"):
        attention_mask(window, AttentionKind.NONE)


def test_rational_samples_per_code_are_cut_on_the_absolute_grid() -> None:
    windows = windows_of(RATIONAL, StreamingOptions((5, 7), 3), range(33))
    assert [w.num_samples for w in windows] == [2563, 3590, 3590, 3589, 3590]
    assert sum(w.num_samples for w in windows) == 33 * 44_100 // 86
    assert [w.first_sample for w in windows] == [0, 2563, 6153, 9743, 13332]
    assert [w.skip_samples for w in windows] == [0, 1538, 1538, 1539, 1538]


def test_sample_index_rounds_down_on_both_sides_of_zero() -> None:
    assert [sample_index(p, Fraction(5, 2)) for p in (-2, -1, 0, 1, 2)] == [-5, -3, 0, 2, 5]


def test_carry_is_the_last_buffer_codes_after_each_block() -> None:
    stream = DecoderStream(SPEC, StreamingOptions(SIZES, 4), carry=(50, 51, 52))
    carries = []
    for codes in ((0, 1), (2, 3, 4), (5, 6, 7, 8), (9, 10)):
        (window,) = stream.push(codes) or stream.finish()
        carries.append(stream.carry)
        assert window.carry(4) == stream.carry
    assert carries == [(51, 52, 0, 1), (1, 2, 3, 4), (5, 6, 7, 8), (7, 8, 9, 10)]
    assert stream.num_codes == 11


def test_without_a_buffer_nothing_is_carried() -> None:
    stream = DecoderStream(SPEC, StreamingOptions(SIZES, 0), carry=(50,))
    assert stream.carry == ()
    (window,) = stream.push((0, 1))
    assert window.codes == (0, 1)
    assert window.carry(0) == ()
    assert stream.carry == ()


def test_a_carry_longer_than_the_buffer_counts_by_its_end() -> None:
    long = windows_of(SPEC, StreamingOptions(SIZES, 4), CODES, carry=tuple(range(30, 40)))
    short = windows_of(SPEC, StreamingOptions(SIZES, 4), CODES, carry=(36, 37, 38, 39))
    assert long == short


def test_an_empty_carry_is_a_continuation() -> None:
    """Its block 0 is not a first block, so that 'once' prepends no prompt."""
    options = StreamingOptions(SIZES, 0, prepend=ONCE)
    fresh = windows_of(SPEC, options, CODES, prompt_codes=(20, 21))
    continued = windows_of(SPEC, options, CODES, prompt_codes=(20, 21), carry=())
    assert (fresh[0].prompt_len, continued[0].prompt_len) == (2, 0)
    assert fresh[1:] == continued[1:]


def test_a_token_offset_moves_positions_and_keeps_offsets_of_the_job() -> None:
    options = StreamingOptions((5, 7), 3)
    whole = windows_of(RATIONAL, options, range(24))
    stream = DecoderStream(RATIONAL, options)
    stream.push((0, 1, 2, 3, 4))
    later = windows_of(
        RATIONAL,
        StreamingOptions((7,), 3),
        range(5, 24),
        carry=stream.carry,
        token_offset=stream.next_token_offset,
    )
    assert stream.next_token_offset == 5
    assert [w.positions for w in later] == [w.positions for w in whole[1:]]
    assert [w.codes for w in later] == [w.codes for w in whole[1:]]
    assert [w.skip_samples for w in later] == [w.skip_samples for w in whole[1:]]
    assert [w.num_samples for w in later] == [w.num_samples for w in whole[1:]]
    skipped = whole[1].first_sample
    assert [w.first_sample for w in later] == [w.first_sample - skipped for w in whole[1:]]
    assert later[0].first_sample == 0


@pytest.mark.parametrize("start", [{"prompt_codes": (3, 64)}, {"carry": (-1,)}])
def test_codes_outside_the_codebook_are_refused(start: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CodeRangeError, match=r"(64|-1) is outside 0\.\.63"):
        DecoderStream(SPEC, StreamingOptions(), **start)


def test_a_speech_code_outside_the_codebook_leaves_the_stream_as_it_was() -> None:
    stream = DecoderStream(SPEC, StreamingOptions(SIZES, 4))
    with pytest.raises(CodeRangeError, match="speech code 64"):
        stream.push((1, 64))
    (window,) = stream.push((1, 2))
    assert (window.block, window.num_samples) == ((1, 2), 20)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(DecoderConfigError, match="token_offset -1"):
        DecoderStream(SPEC, StreamingOptions(), token_offset=-1)


def test_a_stream_reports_its_position() -> None:
    stream = DecoderStream(SPEC, StreamingOptions(SIZES, 1), prompt_codes=(1, 2))
    stream.push((3, 4, 5))
    assert repr(stream) == (
        "DecoderStream(blocks=1, codes=2, waiting=1, history=1, prompt=2, finished=False)"
    )


def test_a_look_ahead_is_right_context_and_never_emitted() -> None:
    windows = windows_of(SPEC, StreamingOptions(SIZES, 2, look_ahead=3), CODES)
    assert [w.codes for w in windows] == [
        (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 5, 6, 7),
        (3, 4, 5, 6, 7, 8, 9, 10),
        (7, 8, 9, 10),
    ]
    assert [w.future_len for w in windows] == [3, 3, 2, 0]
    assert [w.block_ids[-w.future_len :] for w in windows[:3]] == [(1, 1, 1), (2, 2, 2), (3, 3)]
    assert [w.positions[-1] for w in windows] == [4, 7, 10, 10]
    assert [(w.first_sample, w.num_samples) for w in windows] == [
        (0, 20),
        (20, 30),
        (50, 40),
        (90, 20),
    ]


def test_a_block_causal_mask_hides_the_look_ahead_too() -> None:
    masks = MaskPolicy(block_causal=True, prepend_prompt_speech_tokens_causal=True)
    window = windows_of(SPEC, StreamingOptions((1, 2), 1, masks, look_ahead=3), CODES)[1]
    assert window.codes == (0, 1, 2, 3, 4, 5)
    assert picture(attention_mask(window, AttentionKind.BIDIRECTIONAL)) == (
        ["1....."] + ["111..."] * 2 + ["11111."] * 2 + ["111111"]
    )


FRAMES = replace(SPEC, samples_per_code=Fraction(70, 7), layout=(0, 1, 2, 2, 1, 2, 2))


def test_the_layout_determines_the_codes_per_frame() -> None:
    assert (FRAMES.codes_per_frame, FRAMES.num_codebooks, FRAMES.samples_per_frame) == (7, 3, 70)


@pytest.mark.parametrize("start", [{"prompt_codes": (1,)}, {"carry": (1, 2)}, {"token_offset": 8}])
def test_a_stream_takes_whole_frames(start: dict[str, object]) -> None:
    with pytest.raises(CodeRangeError, match="give a multiple"):
        DecoderStream(FRAMES, StreamingOptions((7,)), **start)


@pytest.mark.parametrize(
    "options", [StreamingOptions((6,)), StreamingOptions((7,), look_ahead=6)], ids=str
)
def test_a_block_is_whole_frames(options: StreamingOptions) -> None:
    with pytest.raises(DecoderConfigError, match="give a multiple"):
        DecoderStream(FRAMES, options)


def test_a_mode_with_a_prompt_works_without_one() -> None:
    for mode in PrependPromptSpeechTokens:
        windows = windows_of(SPEC, StreamingOptions(SIZES, 4, prepend=mode), CODES)
        assert [w.prompt_len for w in windows] == [0, 0, 0, 0]


def test_modes_are_their_strings() -> None:
    assert PrependPromptSpeechTokens("rolling") is ROLLING
    assert ROLLING == "rolling"
    with pytest.raises(ValueError, match="sometimes"):
        PrependPromptSpeechTokens("sometimes")
