"""Conversion between Wyoming's events and requests, voices and events of a synthesis.

| Wyoming | here |
|---|---|
| `synthesize` | `SynthesizeStreamRequest` |
| `synthesize-start`, `synthesize-chunk`, `synthesize-stop` | a `StreamingSynthesize` call |
| `audio-start`, `audio-chunk`, `audio-stop` | `Started`, `AudioChunk`, `Done` |
| `info` | the voices |
| `error` | the status of a call that failed |

Audio is PCM of 16 bits, mono, at the codec's sample rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from google.rpc.error_details_pb2 import ErrorInfo

from tts import __version__
from tts.server.status import RpcStatus
from tts.server.wire.common import Violations
from tts.speech.types import AudioChunk, Done, SessionEvent, SpeechEvent, Started
from tts.v1 import speech_pb2 as pb
from tts.voices.types import Voice
from tts.wyoming.frames import convert, encode

WIDTH, CHANNELS = 2, 1  # bytes of a sample, channels
PLAIN, SSML = "text", "ssml"
UNKNOWN_LANGUAGES = ["en"]
SYNTHESIZE_STOPPED = encode("synthesize-stopped")

Data = Mapping[str, Any]


class _VoiceChoice(msgspec.Struct, frozen=True):
    name: str | None = None
    language: str | None = None
    speaker: str | None = None


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """Data of `synthesize-start`. `seed` is an addition to the protocol."""

    voice: _VoiceChoice | None = None
    text_format: str | None = None
    seed: int | None = None


class _Synthesize(_Start, frozen=True, kw_only=True):
    text: str


class _Chunk(msgspec.Struct, frozen=True):
    text: str


class _Ping(msgspec.Struct, frozen=True):
    text: str | None = None


def read_synthesize(data: Data) -> pb.SynthesizeStreamRequest:
    """Return the request of a `synthesize` event. Raises InvalidRequestError."""
    asked = convert(data, _Synthesize)
    with Violations() as wrong:
        config = _config(asked, wrong)
        is_known = asked.text_format in (None, PLAIN, SSML)
        wrong.require(is_known, "text_format", f"must be {PLAIN} or {SSML}")
    is_ssml = asked.text_format == SSML
    spoken = pb.SynthesisInput(ssml=asked.text) if is_ssml else pb.SynthesisInput(text=asked.text)
    return pb.SynthesizeStreamRequest(config=config, input=spoken)


def read_start(data: Data) -> pb.StreamingSynthesizeRequest:
    """Return the first message for a `synthesize-start` event. Raises InvalidRequestError."""
    asked = convert(data, _Start)
    with Violations() as wrong:
        config = _config(asked, wrong)
        is_plain = asked.text_format in (None, PLAIN)
        wrong.require(is_plain, "text_format", f"must be {PLAIN} for text in chunks")
    return pb.StreamingSynthesizeRequest(config=pb.StreamingSynthesizeConfig(synthesis=config))


def read_chunk(data: Data) -> str:
    """Return the text of a `synthesize-chunk` event. Raises InvalidRequestError."""
    return convert(data, _Chunk).text


def to_pong(data: Data) -> bytes:
    """Return the response to a `ping` event, with its text. Raises InvalidRequestError."""
    return encode("pong", {"text": convert(data, _Ping).text})


def to_info(voices: Iterable[Voice], model: str) -> bytes:
    """Return the `info` event: one program for text to speech with these voices.

    Home Assistant shows voices by language only, so a voice without languages has those of the
    other voices, or UNKNOWN_LANGUAGES.
    """
    voices = tuple(voices)
    known = dict.fromkeys(code for voice in voices for code in voice.language_codes)
    spoken = list(known) or UNKNOWN_LANGUAGES
    program = {
        **_artifact("sonant", "Sonant text to speech", "Sonant"),
        "supports_synthesize_streaming": True,
        "voices": [
            {
                **_artifact(voice.name, voice.display_name or voice.name, model),
                "languages": list(voice.language_codes) or spoken,
                "speakers": None,
            }
            for voice in voices
        ],
    }
    others = dict.fromkeys(("asr", "handle", "intent", "wake", "mic", "snd"), ())
    return encode("info", {"tts": [program], **others})


def to_audio(event: SessionEvent | SpeechEvent, sample_rate: int) -> bytes:
    """Return the event for the client; empty for what Wyoming has no event for.

    `sample_rate` is that of the output, in Hz.
    """
    audio_format = {"rate": sample_rate, "width": WIDTH, "channels": CHANNELS}
    match event:
        case Started():
            return encode("audio-start", {**audio_format, "timestamp": 0})
        case AudioChunk():
            start_ms = event.sample_offset * 1000 // sample_rate
            return encode("audio-chunk", {**audio_format, "timestamp": start_ms}, event.data)
        case Done(result):
            return encode("audio-stop", {"timestamp": round(result.usage.audio_s * 1000)})
    return b""


def to_error(status: RpcStatus) -> bytes:
    """Return the `error` event of a status; its code is the reason in ErrorInfo."""
    reasons = [detail.reason for detail in status.details if isinstance(detail, ErrorInfo)]
    return encode("error", {"text": status.message, "code": (*reasons, status.reason)[0]})


def _config(asked: _Start, wrong: Violations) -> pb.SynthesisConfig:
    voice, seed = asked.voice or _VoiceChoice(), asked.seed
    config = pb.SynthesisConfig()
    config.audio_format.encoding = pb.AUDIO_ENCODING_PCM_S16LE
    if voice.name:
        config.voice.name = voice.name
    elif voice.language:
        config.voice.language_code = voice.language.replace("_", "-")
    wrong.require(not voice.speaker, "voice.speaker", "voices have no speakers here; leave it out")
    if seed is not None and wrong.require(0 <= seed < 2**64, "seed", "must fit 64 bits"):
        config.sampling.seed = seed
    return config


def _artifact(name: str, description: str, author: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "attribution": {"name": author, "url": ""},
        "installed": True,
        "version": __version__,
    }
