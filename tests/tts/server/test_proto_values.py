"""Conversion of SpeechService messages to values and back: bounds and defaults."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from decoder import (
    AudioEncoding,
    AudioFormat,
    CodecSpec,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from llm import FinishReason
from tts.errors import InvalidRequestError
from tts.server.wire.common import Violations, optional, plain_float, to_duration
from tts.server.wire.speech import (
    check_voice_name,
    read_config,
    read_event,
    read_input,
    to_audio,
    to_chunking,
    to_session_response,
    to_started,
    to_words,
)
from tts.speech.types import (
    AudioChunk,
    Done,
    SegmentTime,
    SpeechEvent,
    SpeechRequest,
    SpeechTimings,
    SpeechUsage,
    Started,
    SynthesisResult,
    TimestampGranularity,
    UtteranceCancelled,
    WordTime,
    WordTimes,
)
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.text.segmenter import SegmentMode, TextNormalization
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

PLAIN = CodecSpec("toy", sample_rate=16_000, samples_per_code=Fraction(320), codebook_size=64)
FRAMES = CodecSpec(
    "toy", sample_rate=16_000, samples_per_code=Fraction(320), codebook_size=64, layout=(0, 1, 1)
)


def read(
    proto: pb.SynthesisConfig, codec: CodecSpec = PLAIN, path: str = "config", text: str = ""
) -> SpeechRequest:
    """Convert a config to a request; raise InvalidRequestError with all wrong fields."""
    with Violations() as wrong:
        return read_config(proto, codec, path, wrong, text=text)


def wrong_fields(**values: Any) -> list[str]:
    """Return the refused fields of a synthesis config, for a codec of one code per frame."""
    return wrong_fields_for(PLAIN, **values)


def wrong_fields_for(codec: CodecSpec, **values: Any) -> list[str]:
    try:
        read(pb.SynthesisConfig(**values), codec)
    except InvalidRequestError as error:
        return [violation.field for violation in error.violations]
    return []


def test_an_empty_config_sets_no_field() -> None:
    request = read(pb.SynthesisConfig(), text="hello")
    assert (request.text, request.encoding, request.sample_rate) == ("hello", None, 0)
    assert (request.speaking_rate, request.gain_db, request.trim_silence) == (1.0, 0.0, False)
    assert (request.max_audio_s, request.carry, request.normalization) == (None, None, None)
    assert request.segment_mode is SegmentMode.SENTENCE
    assert request.timestamps is TimestampGranularity.NONE
    assert request.check is None
    assert request.chunking is None
    given = pb.SynthesisConfig(chunking=pb.ChunkingConfig(), sampling=common_pb2.SamplingParams())
    empty = read(given)
    assert empty == replace(request, text="")
    assert all(getattr(request.sampling, name) is None for name in request.sampling.__slots__)


def test_every_field_of_a_config_is_in_the_request() -> None:
    proto = pb.SynthesisConfig(
        speaking_rate=1.1,
        volume_gain_db=-3.3,
        pitch=-2.5,
        trim_silence=True,
        segment_mode=pb.SEGMENT_MODE_CLAUSE,
        text_normalization=pb.TEXT_NORMALIZATION_OFF,
        timestamps=pb.TIMESTAMP_GRANULARITY_WORD,
        speech_check=pb.SPEECH_CHECK_ON,
        max_audio_duration=Duration(seconds=2, nanos=500_000_000),
        chunking=pb.ChunkingConfig(
            chunk_sizes=[3, 5],
            buffer=0,
            block_causal=False,
            prepend_prompt_speech_tokens=pb.PREPEND_PROMPT_SPEECH_TOKENS_ROLLING,
            prepend_prompt_speech_tokens_causal=True,
        ),
        audio_format=pb.AudioFormat(encoding=pb.AUDIO_ENCODING_FLAC, sample_rate_hertz=8_000),
        sampling=common_pb2.SamplingParams(top_k=0, seed=0, min_tokens=0, repetition_window=0),
    )
    request = read(proto)
    assert (request.speaking_rate, request.gain_db, request.trim_silence) == (1.1, -3.3, True)
    assert request.pitch == -2.5
    assert request.segment_mode is SegmentMode.CLAUSE
    assert request.normalization is TextNormalization.OFF
    assert request.timestamps is TimestampGranularity.WORD
    assert request.check is True
    assert read(pb.SynthesisConfig(speech_check=pb.SPEECH_CHECK_OFF)).check is False
    assert request.max_audio_s == 2.5
    assert (request.encoding, request.sample_rate) == (AudioEncoding.FLAC, 8_000)
    chunking = request.chunking
    assert chunking is not None
    assert (chunking.chunk_sizes, chunking.buffer, chunking.block_causal) == ((3, 5), 0, False)
    assert chunking.prepend is PrependPromptSpeechTokens.ROLLING
    assert chunking.prepend_prompt_speech_tokens_causal is True
    sampling = request.sampling
    assert (sampling.top_k, sampling.seed, sampling.min_tokens) == (0, 0, 0)
    assert (sampling.repetition_window, sampling.max_tokens) == (0, None)


@pytest.mark.parametrize(
    ("rate", "is_taken"),
    [(0, True), (8_000, True), (48_000, True), (7_999, False), (48_001, False), (-1, False)],
)
def test_sample_rates_have_limits(rate: int, is_taken: bool) -> None:
    fields = wrong_fields(audio_format=pb.AudioFormat(sample_rate_hertz=rate))
    assert fields == ([] if is_taken else ["config.audio_format.sample_rate_hertz"])


@pytest.mark.parametrize(("count", "is_taken"), [(0, True), (1, True), (2, False), (-1, False)])
def test_speech_is_mono(count: int, is_taken: bool) -> None:
    fields = wrong_fields(audio_format=pb.AudioFormat(channel_count=count))
    assert fields == ([] if is_taken else ["config.audio_format.channel_count"])


@pytest.mark.parametrize(
    ("sizes", "is_taken"),
    [
        ([1, 10_000], True),
        ([0], False),
        ([-1], False),
        ([10_001], False),
        ([1] * 64, True),
        ([1] * 65, False),
        ([1, 0], False),
    ],
)
def test_chunk_sizes_have_limits(sizes: list[int], is_taken: bool) -> None:
    fields = wrong_fields(chunking=pb.ChunkingConfig(chunk_sizes=sizes))
    assert fields == ([] if is_taken else ["config.chunking.chunk_sizes"])


@pytest.mark.parametrize(
    ("buffer", "is_taken"), [(0, True), (500, True), (501, False), (-1, False)]
)
def test_a_buffer_has_limits(buffer: int, is_taken: bool) -> None:
    fields = wrong_fields(chunking=pb.ChunkingConfig(buffer=buffer))
    assert fields == ([] if is_taken else ["config.chunking.buffer"])


@pytest.mark.parametrize(
    ("priority", "is_taken"), [(1000, True), (-1000, True), (1001, False), (-1001, False)]
)
def test_a_priority_has_limits(priority: int, is_taken: bool) -> None:
    assert wrong_fields(priority=priority) == ([] if is_taken else ["config.priority"])


def spelled(phrase: str = "x", pronunciation: str = "y", alphabet: int = 0) -> pb.Pronunciation:
    return pb.Pronunciation(phrase=phrase, pronunciation=pronunciation, alphabet=alphabet)  # type: ignore[arg-type]


def test_pronunciations_have_limits() -> None:
    fits = [spelled("p" * 200, "q" * 200), *[spelled()] * 199]
    request = read(pb.SynthesisConfig(pronunciations=fits))
    longest = Pronunciation("p" * 200, "q" * 200)
    assert request.pronunciations == (longest, *[Pronunciation("x", "y")] * 199)
    assert wrong_fields(pronunciations=[*fits, spelled()]) == ["config.pronunciations"]
    assert wrong_fields(pronunciations=[spelled(), spelled("p" * 201), spelled(" ", "")]) == [
        "config.pronunciations[1].phrase",
        "config.pronunciations[2].phrase",
        "config.pronunciations[2].pronunciation",
    ]
    assert wrong_fields(pronunciations=[spelled(alphabet=9)]) == [
        "config.pronunciations[0].alphabet"
    ]


@pytest.mark.parametrize(
    ("codec", "tokens", "is_taken"),
    [
        (PLAIN, [0, 63], True),
        (PLAIN, [64], False),
        (PLAIN, [-1], False),
        (FRAMES, [1, 2, 3], True),
        (FRAMES, [1, 2], False),
        (FRAMES, [1, 2, 3, 4], False),
        (FRAMES, [], True),
    ],
)
def test_a_carry_is_whole_frames_of_known_tokens(
    codec: CodecSpec, tokens: list[int], is_taken: bool
) -> None:
    fields = wrong_fields_for(codec, buffer_speech_tokens=pb.SpeechTokens(tokens=tokens))
    assert fields == ([] if is_taken else ["config.buffer_speech_tokens"])


@pytest.mark.parametrize(("codec", "kept"), [(PLAIN, 500), (FRAMES, 498)])
def test_a_long_carry_keeps_its_last_whole_frames(codec: CodecSpec, kept: int) -> None:
    tokens = [number % 64 for number in range(600)]
    proto = pb.SynthesisConfig(buffer_speech_tokens=pb.SpeechTokens(tokens=tokens))
    assert read(proto, codec).carry == tuple(tokens[-kept:])


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "ignore_eos"])
def test_sampling_of_text_is_not_for_speech(field: str) -> None:
    values = {"stop": ["x"], "stop_token_ids": [1], "ignore_eos": True}
    sampling = common_pb2.SamplingParams(**{field: values[field]})  # type: ignore[arg-type]
    assert wrong_fields(sampling=sampling) == [f"config.sampling.{field}"]


def test_fields_are_named_by_their_path_in_the_message() -> None:
    values = {"timestamps": 9, "segment_mode": 9, "speech_check": 9}
    proto = pb.SynthesisConfig(priority=5000, **values)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError) as caught:
        read(proto, path="start.config")
    assert [violation.field for violation in caught.value.violations] == [
        "start.config.segment_mode",
        "start.config.timestamps",
        "start.config.speech_check",
        "start.config.priority",
    ]


def collect(*found: str, then: Exception) -> None:
    """Record a violation of each field, then raise an error."""
    with Violations() as wrong:
        for field in found:
            wrong.require(False, field, "is wrong")
        wrong.require(True, "right", "is right")
        raise then


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (("a",), ["a: is wrong", "b: also wrong"]),
        (("b",), ["b: is wrong"]),
        ((), ["b: also wrong"]),
    ],
)
def test_an_inner_error_is_merged_without_repeated_fields(
    found: tuple[str, ...], named: list[str]
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        collect(*found, then=InvalidRequestError.of("b", "also wrong"))
    assert [str(violation) for violation in caught.value.violations] == named


def test_another_inner_error_is_raised_unchanged() -> None:
    with pytest.raises(KeyError):
        collect("a", then=KeyError())


@pytest.mark.parametrize(
    ("request_id", "is_taken"), [("", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)]
)
def test_request_ids_have_limits(request_id: str, is_taken: bool) -> None:
    assert wrong_fields(request_id=request_id) == ([] if is_taken else ["config.request_id"])


@pytest.mark.parametrize(
    ("tag", "is_taken"), [("", True), ("en", True), ("en-US", True), ("e", False), ("en US", False)]
)
def test_languages_are_tags(tag: str, is_taken: bool) -> None:
    fields = wrong_fields(voice=pb.VoiceSelection(language_code=tag))
    assert fields == ([] if is_taken else ["config.voice.language_code"])


def test_voice_names_are_validated() -> None:
    check_voice_name("hazel-2", "config.voice.name")
    with pytest.raises(InvalidRequestError, match=r"^config\.voice\.name: is no voice name"):
        check_voice_name("a/b", "config.voice.name")


def test_a_text_may_be_as_long_as_the_limit() -> None:
    with Violations() as wrong:
        assert read_input(pb.SynthesisInput(text="x" * 10), 10, wrong) == ("x" * 10, None)
    with pytest.raises(InvalidRequestError) as caught, Violations() as wrong:
        read_input(pb.SynthesisInput(text="x" * 11), 10, wrong)
    assert [str(violation) for violation in caught.value.violations] == [
        "input.text: has 11 characters, the limit is 10"
    ]


def test_pronunciations_have_an_alphabet_and_keep_their_order() -> None:
    ipa = spelled("a", "b", alphabet=pb.PRONUNCIATION_ALPHABET_IPA)
    arpabet = spelled("c", "D", alphabet=pb.PRONUNCIATION_ALPHABET_ARPABET)
    request = read(pb.SynthesisConfig(pronunciations=[ipa, spelled(), arpabet]))
    assert request.pronunciations == (
        Pronunciation("a", "b", Alphabet.IPA),
        Pronunciation("x", "y"),
        Pronunciation("c", "D", Alphabet.ARPABET),
    )


@pytest.mark.parametrize(
    ("value", "expected"), [(0.699999988079071, 0.7), (1.10000002384, 1.1), (0.12345678, 0.1234568)]
)
def test_a_float_has_its_shortest_decimal_value(value: float, expected: float) -> None:
    assert plain_float(value) == expected


def test_durations_are_seconds_and_back() -> None:
    proto = pb.SynthesisConfig(max_audio_duration=Duration(seconds=3, nanos=250_000_000))
    assert optional(proto, "max_audio_duration") == 3.25
    assert optional(pb.SynthesisConfig(), "max_audio_duration") is None
    assert to_duration(3.25) == Duration(seconds=3, nanos=250_000_000)
    assert to_duration(0.999999999) == Duration(nanos=999_999_999)
    assert to_duration(2.0) == Duration(seconds=2)
    assert to_duration(None) is None


def test_events_become_responses() -> None:
    started = Started("one", "toy", AudioFormat(AudioEncoding.PCM_S16LE, 16_000), seed=7)
    assert to_started(started).audio_format == pb.AudioFormat(
        encoding=pb.AUDIO_ENCODING_PCM_S16LE, sample_rate_hertz=16_000, channel_count=1
    )
    chunk = AudioChunk(b"ab", 1, 2, 3, 4, 5, 6, 7, 8, carry=(9,))
    assert to_audio(chunk).buffer_speech_tokens.tokens == [9]
    words = to_words([WordTime("hi", 0.5, 1.25, 3, 5)]).words
    assert [(w.word, w.start.nanos, w.end.seconds, w.text_start, w.text_end) for w in words] == [
        ("hi", 500_000_000, 1, 3, 5)
    ]


@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.parametrize("prompt_causal", [False, True])
def test_streaming_options_become_chunking_messages(
    block_causal: bool, prompt_causal: bool
) -> None:
    masks = MaskPolicy(block_causal, prompt_causal)
    told = to_chunking(StreamingOptions((3, 5), 7, masks, PrependPromptSpeechTokens.ONCE))
    assert (list(told.chunk_sizes), told.buffer) == ([3, 5], 7)
    assert told.prepend_prompt_speech_tokens == pb.PREPEND_PROMPT_SPEECH_TOKENS_ONCE
    assert (told.block_causal, told.prepend_prompt_speech_tokens_causal) == (
        block_causal,
        prompt_causal,
    )


COUNTS = st.integers(0, 2**31 - 1)
SECONDS = st.floats(0, 1e5)
NAMES = st.text("aé😀", max_size=3)
CODES = st.lists(COUNTS, max_size=3).map(tuple)
SAID = st.builds(Pronunciation, NAMES, NAMES, st.sampled_from([Alphabet.LETTERS, Alphabet.IPA]))
EVENTS = st.one_of(
    st.builds(
        Started,
        NAMES,
        NAMES,
        st.builds(AudioFormat, st.sampled_from(AudioEncoding), COUNTS, st.just(1)),
        st.integers(0, 2**64 - 1),
    ),
    st.builds(AudioChunk, st.binary(max_size=4), *[COUNTS] * 8, CODES, COUNTS),
    st.builds(
        WordTimes,
        st.lists(
            st.builds(WordTime, NAMES, SECONDS, SECONDS, COUNTS, COUNTS), min_size=1, max_size=3
        ).map(tuple),
    ),
    st.builds(SegmentTime, COUNTS, SECONDS, SECONDS, COUNTS, COUNTS),
    st.builds(
        Done,
        st.builds(
            SynthesisResult,
            st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED]),
            st.builds(SpeechUsage, COUNTS, COUNTS, COUNTS, COUNTS, SECONDS),
            st.builds(
                SpeechTimings,
                *[st.none() | SECONDS] * 3,
                SECONDS,
            ),
            st.lists(NAMES, max_size=2).map(tuple),
            pronunciations=st.lists(SAID, max_size=2).map(tuple),
            num_retried_segments=COUNTS,
        ),
    ),
)


@given(EVENTS)
def test_events_are_read_as_they_were_sent(event: SpeechEvent) -> None:
    sent = to_session_response(event)
    read = read_event(sent)
    assert type(read) is type(event)
    assert to_session_response(read) == sent


def test_events_of_other_sessions_are_not_read() -> None:
    with pytest.raises(ValueError, match="cancelled"):
        read_event(to_session_response(UtteranceCancelled(0)))
