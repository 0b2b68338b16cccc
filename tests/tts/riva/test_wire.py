"""Conversion between Riva's messages and ours: tables of fields, encodings, pronunciations."""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tts.errors import (
    FieldViolation,
    InvalidRequestError,
    NotAvailableError,
    Precondition,
    PreconditionError,
)
from tts.riva.stubs import common_pb2
from tts.riva.stubs import tts_pb2 as pb
from tts.riva.wire import (
    ENCODINGS,
    FIELDS,
    check_phrase,
    riva_name,
    riva_names,
    to_config,
    to_configs,
    to_input,
    to_words,
)
from tts.server.wire.common import Violations
from tts.speech.synthesizer import Synthesizer
from tts.speech.types import WordTime
from tts.v1 import speech_pb2
from tts.voices.types import Voice


def field_at(message: Descriptor, path: str) -> FieldDescriptor:
    """Return the field of a message type at a path; raise KeyError if there is none."""
    name, _, rest = path.partition(".")
    field = message.fields_by_name[name]
    return field_at(field.message_type, rest) if rest else field


def test_both_sides_of_the_table_of_fields_exist() -> None:
    ours, theirs = speech_pb2.SynthesizeRequest, pb.SynthesizeSpeechRequest
    for field, name in FIELDS.items():
        field_at(ours.DESCRIPTOR, field)
        field_at(theirs.DESCRIPTOR, re.sub(r"\[\w+\]$", "", name))


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("input.text", "text"),
        ("text", "text"),
        ("", ""),
        ("config.synthesis.voice.name", "voice_name"),
        ("config.voice.prompt.audio", "zero_shot_data.audio_prompt"),
        ("config.pronunciations[7].phrase", "custom_dictionary[7]"),
        ("config.synthesis.sampling.top_k", "custom_configuration[top_k]"),
        ("custom_configuration[top_k]", "custom_configuration[top_k]"),
    ],
)
def test_errors_name_fields_of_the_client(field: str, name: str) -> None:
    assert riva_name(field) == name
    with pytest.raises(InvalidRequestError) as caught, riva_names():
        raise InvalidRequestError.of(field, "is wrong")
    assert caught.value.violations == (FieldViolation(name, "is wrong"),)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (Precondition.WORD_TIMESTAMPS, "enable_word_time_offsets: cannot"),
        (Precondition.SPEECH, "cannot"),
    ],
)
def test_lacking_features_name_the_field(reason: Precondition, message: str) -> None:
    with pytest.raises(PreconditionError, match=f"^{message}$") as caught, riva_names():
        raise PreconditionError(reason, "cannot")
    assert caught.value.reason is reason


def test_every_encoding_is_known() -> None:
    assert ENCODINGS.keys() == set(common_pb2.AudioEncoding.values())


def config_of(synthesizer: Synthesizer, **values: object) -> speech_pb2.SynthesisConfig:
    with Violations() as wrong:
        return to_config(pb.SynthesizeSpeechRequest(**values), synthesizer, wrong)  # type: ignore[arg-type]


def test_a_request_is_converted(synthesizer: Synthesizer) -> None:
    assert config_of(
        synthesizer,
        language_code="en-US",
        encoding=common_pb2.MULAW,
        sample_rate_hz=8000,
        voice_name="owen",
        custom_dictionary="SQL  sequel, New York  noo york ,",
        custom_configuration={"seed": "5", "top_p": "0.5", "speaking_rate": "1.5"},
        enable_word_time_offsets=True,
        id=common_pb2.RequestId(value="mine"),
    ) == speech_pb2.SynthesisConfig(
        voice=speech_pb2.VoiceSelection(name="owen", language_code="en-US"),
        audio_format=speech_pb2.AudioFormat(
            encoding=speech_pb2.AUDIO_ENCODING_MULAW, sample_rate_hertz=8000
        ),
        pronunciations=[
            speech_pb2.Pronunciation(phrase="SQL", pronunciation="sequel"),
            speech_pb2.Pronunciation(phrase="New York", pronunciation="noo york"),
        ],
        sampling={"seed": 5, "top_p": 0.5},
        speaking_rate=1.5,
        timestamps=speech_pb2.TIMESTAMP_GRANULARITY_WORD,
        request_id="mine",
    )


def test_without_an_encoding_audio_is_linear_pcm(synthesizer: Synthesizer) -> None:
    """Also where the server's default for its own protocol is another one."""
    encoding = config_of(synthesizer).audio_format.encoding
    assert encoding == speech_pb2.AUDIO_ENCODING_PCM_S16LE


@pytest.mark.parametrize(
    ("pronunciation", "alphabet"),
    [
        ("sequel", 0),
        ("jay-son", 0),
        ("pro'noun s", 0),
        ("crème brûlée", 0),
        ("AY BEE EM", 0),
        ("təˈmeɪˌtoʊ", 1),
        ("kuːl", 1),
        ("kæt", 1),
        ("θæŋk", 1),
        ("/kat/", 1),
        ("{@K}{@AE1}{@T}", 2),
        ("K AE1 T", 2),
    ],
)
def test_phonetic_signs_are_recognised(
    synthesizer: Synthesizer, pronunciation: str, alphabet: int
) -> None:
    found = config_of(synthesizer, custom_dictionary=f"word  {pronunciation}").pronunciations
    (entry,) = found
    assert (entry.pronunciation, entry.alphabet) == (pronunciation, alphabet)


def test_a_dictionary_is_read_no_further_than_its_limit(synthesizer: Synthesizer) -> None:
    """The last entry has the rest, so that SpeechService's check finds one entry too many."""
    entries = config_of(synthesizer, custom_dictionary="a  b," * 100_000).pronunciations
    assert len(entries) == 201


@pytest.mark.parametrize(
    ("data", "encoding", "rate"),
    [
        ({"encoding": common_pb2.LINEAR_PCM, "sample_rate_hz": 16_000}, 1, 16_000),
        ({"encoding": common_pb2.LINEAR_PCM}, 1, 22_050),
        ({"encoding": common_pb2.ALAW, "sample_rate_hz": 8_000}, 4, 8_000),
        ({"encoding": common_pb2.OGGOPUS, "sample_rate_hz": 8_000}, None, 0),
        ({"sample_rate_hz": 16_000}, None, 0),
        ({"encoding": common_pb2.LINEAR_PCM, "audio_prompt": b"RIFF1234WAVE"}, None, 0),
    ],
)
def test_the_format_of_a_prompt(
    synthesizer: Synthesizer, data: dict[str, object], encoding: int | None, rate: int
) -> None:
    """Files are recognised by their first bytes: Riva's clients send WAV as LINEAR_PCM."""
    sent = pb.ZeroShotData(**{"audio_prompt": b"\1\0" * 9, "quality": 40, **data})  # type: ignore[arg-type]
    prompt = config_of(synthesizer, zero_shot_data=sent, voice_name="x").voice.prompt
    assert prompt.audio == sent.audio_prompt
    assert prompt.HasField("format") is (encoding is not None)
    assert (prompt.format.encoding or None, prompt.format.sample_rate_hertz) == (encoding, rate)


@pytest.mark.parametrize(
    "text",
    ["<speak>hi</speak>", ' \n<speak version="1.1">', '<?xml version="1.0"?>\n<speak>hi</speak>'],
)
def test_ssml_is_refused_where_text_is_streamed_in(text: str) -> None:
    assert to_input(text).ssml == text
    with pytest.raises(NotAvailableError, match="SSML"):
        check_phrase(text, 100)


@pytest.mark.parametrize("text", ["<speaker> says", "x <speak>", "<p>hi</p>", ""])
def test_other_text_is_not_ssml(text: str) -> None:
    check_phrase(text, 100)
    assert to_input(text).text == text


def test_voices_are_listed_by_language() -> None:
    voices = [Voice("a", language_codes=("en-US", "de")), Voice("b"), Voice("c", "", ("en-US",))]
    found = {
        config.parameters["language_code"]: config.parameters["subvoices"]
        for config in to_configs(voices, "model", 16_000)
    }
    assert found == {"en-US": "a:0,c:1", "de": "a:0", "": "b:0"}


def test_times_of_words_are_milliseconds() -> None:
    meta = to_words([WordTime("one", 0.0104, 0.5, 0, 3), WordTime("two", 0.5, 1.25, 4, 7)])
    assert [(w.word, w.start_time, w.end_time) for w in meta.words] == [
        ("one", 10, 500),
        ("two", 500, 1250),
    ]
    assert list(meta.predicted_durations) == pytest.approx([0.4896, 0.75])
