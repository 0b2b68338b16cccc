"""SpeechService over a real connection: errors for wrong fields and unsupported features."""

from __future__ import annotations

import re
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.tts.serving import (
    Serving,
    collect_speech,
    error_of,
    fields_of,
    reason_of,
    run_with_server,
    session_config,
    stream_request,
    unary_request,
)
from tts.factory import Service
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb

TOO_MANY = pb.SpeechTokens(tokens=[0] * 100_001)
SPEECH_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"speaking_rate": 0.2}, "config.speaking_rate"),
    ({"speaking_rate": 4.1}, "config.speaking_rate"),
    ({"speaking_rate": float("nan")}, "config.speaking_rate"),
    ({"volume_gain_db": -96.5}, "config.volume_gain_db"),
    ({"volume_gain_db": 17}, "config.volume_gain_db"),
    ({"pitch": 12.5}, "config.pitch"),
    ({"pitch": float("nan")}, "config.pitch"),
    ({"pitch": 1.0}, "config.pitch"),  # this codec has none
    (
        {"audio_format": pb.AudioFormat(sample_rate_hertz=7_999)},
        "config.audio_format.sample_rate_hertz",
    ),
    (
        {"audio_format": pb.AudioFormat(sample_rate_hertz=48_001)},
        "config.audio_format.sample_rate_hertz",
    ),
    (
        {"audio_format": pb.AudioFormat(sample_rate_hertz=-1)},
        "config.audio_format.sample_rate_hertz",
    ),
    ({"audio_format": pb.AudioFormat(encoding=99)}, "config.audio_format.encoding"),
    ({"audio_format": pb.AudioFormat(channel_count=2)}, "config.audio_format.channel_count"),
    (
        {
            "audio_format": pb.AudioFormat(
                encoding=pb.AUDIO_ENCODING_OGG_OPUS, sample_rate_hertz=44_100
            )
        },
        "config.audio_format",
    ),
    ({"chunking": pb.ChunkingConfig(chunk_sizes=[4, 0])}, "config.chunking.chunk_sizes"),
    ({"chunking": pb.ChunkingConfig(chunk_sizes=[1] * 65)}, "config.chunking.chunk_sizes"),
    ({"chunking": pb.ChunkingConfig(buffer=-1)}, "config.chunking.buffer"),
    ({"chunking": pb.ChunkingConfig(buffer=501)}, "config.chunking.buffer"),
    (
        {"chunking": pb.ChunkingConfig(prepend_prompt_speech_tokens=9)},
        "config.chunking.prepend_prompt_speech_tokens",
    ),
    ({"timestamps": 9}, "config.timestamps"),
    ({"text_normalization": 9}, "config.text_normalization"),
    ({"segment_mode": 9}, "config.segment_mode"),
    ({"max_audio_duration": Duration(seconds=-1)}, "config.max_audio_duration"),
    ({"max_audio_duration": Duration()}, "config.max_audio_duration"),
    ({"request_id": "x" * 129}, "config.request_id"),
    ({"request_id": "line\nfeed"}, "config.request_id"),
    ({"priority": 2**31 - 1}, "config.priority"),
    ({"buffer_speech_tokens": pb.SpeechTokens(tokens=[64])}, "config.buffer_speech_tokens"),
    ({"buffer_speech_tokens": pb.SpeechTokens(tokens=[-1])}, "config.buffer_speech_tokens"),
    ({"voice": pb.VoiceSelection(language_code="e n")}, "config.voice.language_code"),
    ({"voice": pb.VoiceSelection(name="hazel", language_code="fr")}, "config.voice.language_code"),
    (
        {"voice": pb.VoiceSelection(name="owen", language_code="en-GB")},
        "config.voice.language_code",
    ),
    ({"voice": pb.VoiceSelection(name="../etc/passwd")}, "config.voice.name"),
    ({"voice": pb.VoiceSelection(name="http://x/y")}, "config.voice.name"),
    (
        {"voice": pb.VoiceSelection(prompt_tokens=pb.SpeechTokens(tokens=[1, 64]))},
        "config.voice.prompt_tokens",
    ),
    ({"voice": pb.VoiceSelection(prompt_tokens=pb.SpeechTokens())}, "config.voice.prompt_tokens"),
    ({"voice": pb.VoiceSelection(prompt_tokens=TOO_MANY)}, "config.voice.prompt_tokens"),
    ({"buffer_speech_tokens": TOO_MANY}, "config.buffer_speech_tokens"),
    ({"pronunciations": [pb.Pronunciation(phrase="x")]}, "config.pronunciations[0].pronunciation"),
    (
        {"pronunciations": [pb.Pronunciation(phrase="🎉", pronunciation="x")]},
        "config.pronunciations[0].phrase",
    ),
    (
        {"pronunciations": [pb.Pronunciation(phrase="a", pronunciation="日", alphabet=1)]},
        "config.pronunciations[0].pronunciation",
    ),
    (
        {"pronunciations": [pb.Pronunciation(phrase="a", pronunciation="ZZ1", alphabet=2)]},
        "config.pronunciations[0].pronunciation",
    ),
]

SAMPLING_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": 1.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"repetition_window": -1}, "repetition_window"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
    ({"stop": ["x"]}, "stop"),
]


def test_every_wrong_field_is_named(service: Service) -> None:
    cases = SPEECH_FIELDS + [
        ({"sampling": common_pb2.SamplingParams(**values), "seed": None}, f"config.sampling.{name}")
        for values, name in SAMPLING_FIELDS
    ]

    async def ask(served: Serving) -> None:
        for values, field in cases:
            call = served.speech.SynthesizeStream(stream_request(**values))
            assert fields_of(await error_of(call)) == [field], values
        await collect_speech(served)

    run_with_server(service, ask)


def test_all_wrong_fields_are_named_together(service: Service) -> None:
    async def ask(served: Serving) -> None:
        call = served.speech.Synthesize(
            unary_request("", speaking_rate=9, volume_gain_db=90, request_id="ü")
        )
        assert set(fields_of(await error_of(call))) == {
            "input.text",
            "config.speaking_rate",
            "config.volume_gain_db",
            "config.request_id",
        }

    run_with_server(service, ask)


def test_limits_themselves_are_allowed(service: Service) -> None:
    async def ask(served: Serving) -> None:
        sampling = common_pb2.SamplingParams(temperature=0, top_p=1, seed=2**64 - 1, max_tokens=3)
        for rate, gain in ((0.25, -96), (4, 16)):
            spoken = await collect_speech(
                served, speaking_rate=rate, volume_gain_db=gain, sampling=sampling, seed=None
            )
            assert spoken.started.seed == 2**64 - 1
        with pytest.raises(ValueError, match="out of range"):
            common_pb2.SamplingParams(seed=-1)

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n\t ", "is empty"),
        ("a\0b", "U\\+0000 at position 1"),
        ("ab\x1b[31m", "U\\+001B"),
        ("x" * 10_001, "has 10001 characters, the limit is 10000"),
    ],
)
def test_texts_that_are_refused(service: Service, text: str, message: str) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.speech.Synthesize(unary_request(text)))
        assert fields_of(error) == ["input.text"]
        assert re.search(message, error.details())

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        ({"ssml": ""}, grpc.StatusCode.INVALID_ARGUMENT, "input.ssml"),
        ({"ssml": "<speak><b>hi</b></speak>"}, grpc.StatusCode.INVALID_ARGUMENT, "input.ssml"),
        ({"tags": "x" * 10_001}, grpc.StatusCode.INVALID_ARGUMENT, "input.tags"),
        (
            {"ssml": "<speak><prosody pitch='high'>hi</prosody></speak>"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "input.ssml",
        ),
        ({"tags": "[voice:nemo]hi"}, grpc.StatusCode.NOT_FOUND, None),
        ({"tags": "[hi](/h日/)"}, grpc.StatusCode.INVALID_ARGUMENT, "input.tags"),
    ],
)
def test_markup_that_is_refused(
    service: Service, given: dict[str, Any], code: grpc.StatusCode, field: str | None
) -> None:
    async def ask(served: Serving) -> None:
        request = pb.SynthesizeRequest(input=pb.SynthesisInput(**given))
        error = await error_of(served.speech.Synthesize(request))
        assert error.code() is code
        assert field is None or fields_of(error) == [field]

    run_with_server(service, ask)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"timestamps": pb.TIMESTAMP_GRANULARITY_WORD}, "WORD_TIMESTAMPS_UNAVAILABLE"),
        ({"instructions": "whisper"}, "INSTRUCTIONS_UNAVAILABLE"),
    ],
)
def test_fields_that_this_model_does_not_support_are_refused(
    service: Service, values: dict[str, Any], reason: str
) -> None:
    async def ask(served: Serving) -> None:
        error = await error_of(served.speech.SynthesizeStream(stream_request(**values)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert reason_of(error) == reason

    run_with_server(service, ask)


def test_unknown_voices_and_models(service: Service) -> None:
    async def ask(served: Serving) -> None:
        voice = pb.VoiceSelection(name="unknown")
        for call in (
            served.speech.Synthesize(unary_request(voice=voice)),
            served.speech.SynthesizeStream(stream_request(voice=voice)),
            served.speech.StreamingSynthesize(iter([session_config(voice=voice)])),
            served.speech.DeleteVoice(pb.DeleteVoiceRequest(name="unknown")),
        ):
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert reason_of(error) == "VOICE_NOT_FOUND"
            assert "hazel" in error.details()
        error = await error_of(served.speech.Synthesize(unary_request(model="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert reason_of(error) == "MODEL_NOT_FOUND"
        named = await served.speech.Synthesize(unary_request(model=service.model))
        assert named.audio

    run_with_server(service, ask)
