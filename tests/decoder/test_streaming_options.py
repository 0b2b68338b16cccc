"""Validation of streaming options: errors and warnings."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from decoder import (
    AttentionKind,
    CodecSpec,
    DecoderConfigError,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
    validate_streaming,
)

SPEC = CodecSpec(
    "toy", sample_rate=1000, samples_per_code=Fraction(10), codebook_size=64, receptive_field=5
)
FRAMES = replace(SPEC, samples_per_code=Fraction(70, 7), layout=(0, 1, 2, 2, 1, 2, 2))
SIZES = (2, 3, 4)

ONCE = PrependPromptSpeechTokens.ONCE
ROLLING = PrependPromptSpeechTokens.ROLLING


@pytest.mark.parametrize(
    ("sizes", "buffer", "message"),
    [
        ((), 0, "chunk_size is empty"),
        ((2, 0), 0, "chunk_size 0 is not a positive integer"),
        ((-3,), 0, "chunk_size -3"),
        ((2.0,), 0, r"chunk_size 2\.0"),
        ((True,), 0, "chunk_size True"),
        (None, -1, "buffer -1"),
        (None, 1.5, r"buffer 1\.5"),
    ],
)
def test_numbers_that_cannot_work(sizes: tuple[int, ...], buffer: int, message: str) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        validate_streaming(StreamingOptions(sizes, buffer), SPEC)


def test_the_smallest_numbers_work() -> None:
    assert validate_streaming(StreamingOptions((1, 6), 5), SPEC) == []
    assert validate_streaming(StreamingOptions((1,), 5, look_ahead=0), SPEC) == []


@pytest.mark.parametrize("first", [None, 0, 1, 3])
def test_a_first_look_ahead_is_up_to_the_look_ahead(first: int | None) -> None:
    spec = replace(SPEC, right_field=None)
    options = StreamingOptions((6,), 5, look_ahead=3, first_look_ahead=first)
    assert validate_streaming(options, spec) == []


@pytest.mark.parametrize("first", [-1, 4, 1.0, True])
def test_first_look_aheads_that_cannot_work(first: int) -> None:
    options = StreamingOptions((6,), 5, look_ahead=3, first_look_ahead=first)
    with pytest.raises(DecoderConfigError, match=f"first_look_ahead {first} is not an integer"):
        validate_streaming(options, SPEC)


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)])
def test_masks_on_a_decoder_that_cannot_apply_them(flags: tuple[bool, bool]) -> None:
    masks = MaskPolicy(block_causal=flags[0], prepend_prompt_speech_tokens_causal=flags[1])
    unmasked = replace(SPEC, attention=AttentionKind.NONE)
    with pytest.raises(DecoderConfigError, match="'toy' cannot apply attention masks"):
        validate_streaming(StreamingOptions(SIZES, 9, masks), unmasked)
    assert validate_streaming(StreamingOptions(SIZES, 9), unmasked) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (StreamingOptions((7, 12)), "chunk_size is 12 but codec 'toy' has 7 codes per frame"),
        (StreamingOptions((7,), 6), "buffer is 6"),
        (StreamingOptions((7,), 7, look_ahead=1), "look_ahead is 1"),
        (
            StreamingOptions((7,) * 4, 7, look_ahead=14, first_look_ahead=3),
            "first_look_ahead is 3 ",
        ),
    ],
)
def test_frames_are_never_cut(options: StreamingOptions, message: str) -> None:
    with pytest.raises(DecoderConfigError, match=message):
        validate_streaming(options, FRAMES)


def test_a_codec_without_attention_takes_no_voice_prompt() -> None:
    plain = replace(SPEC, attention=AttentionKind.NONE)
    with pytest.raises(DecoderConfigError, match="prepend_prompt_speech_tokens must be 'never'"):
        validate_streaming(StreamingOptions(prepend=ROLLING), plain)


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        (StreamingOptions((6,), 5), []),
        (StreamingOptions(None, 0), []),
        (StreamingOptions((6,), 4), ["buffer of 4 codes is below the receptive field (5 codes)"]),
        (
            StreamingOptions((6,), 0, prepend=ROLLING),
            ["rolling prompt codes with buffer 0 act like 'once'", "buffer of 0 codes"],
        ),
        (StreamingOptions((4,), 5, prepend=ONCE), ["first chunk of 4 codes is below"]),
        (StreamingOptions((4, 9), 5, prepend=ONCE), ["first chunk of 4 codes is below"]),
        (StreamingOptions((5, 4), 5, prepend=ONCE), []),
        (StreamingOptions((5,), 5, prepend=ONCE), []),
        (StreamingOptions((4,), 5, prepend=ROLLING), []),
        (StreamingOptions(None, 5, prepend=ONCE), []),
        (
            StreamingOptions(
                (6,),
                5,
                MaskPolicy(block_causal=True),
                ROLLING,
            ),
            ["block_causal without prepend_prompt_speech_tokens_causal leaks"],
        ),
        (
            StreamingOptions((6,), 5, MaskPolicy(block_causal=True)),
            [],
        ),
    ],
)
def test_warnings(options: StreamingOptions, warnings: list[str]) -> None:
    found = validate_streaming(options, SPEC)
    assert len(found) == len(warnings)
    for message, start in zip(found, warnings, strict=True):
        assert message.startswith(start)


def test_a_look_ahead_beyond_the_right_field_is_a_warning() -> None:
    options = StreamingOptions((6,), 5, look_ahead=3)
    assert validate_streaming(options, replace(SPEC, right_field=3)) == []
    assert validate_streaming(options, replace(SPEC, right_field=None)) == []
    (warning,) = validate_streaming(options, replace(SPEC, right_field=2))
    assert warning.startswith("look_ahead of 3 codes is more than this codec uses (2 codes)")


def test_an_unbounded_receptive_field_is_never_covered() -> None:
    spec = replace(SPEC, receptive_field=None)
    found = validate_streaming(StreamingOptions((50,), 1000, prepend=ONCE), spec)
    assert [("unbounded" in message) for message in found] == [True, True]


def test_a_causal_decoder_leaks_nothing() -> None:
    spec = replace(SPEC, attention=AttentionKind.CAUSAL)
    masks = MaskPolicy(block_causal=True)
    assert validate_streaming(StreamingOptions((6,), 5, masks, ROLLING), spec) == []
