"""The one table from the JSON of speech requests to the messages of the wire contract."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tts.errors import InvalidRequestError
from tts.http.exchange import Items, JsonBody
from tts.server.wire.common import to_duration
from tts.server.wire.speech import MAX_CODES_PER_CHUNK
from tts.speech.synthesizer import Synthesizer
from tts.text.segmenter import MAX_EAGER
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.voices.registry import VoiceRegistry

OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""Names of OpenAI's models, which stand for the model that is served."""

OPENAI_VOICES = (
    "alloy",
    "ash",
    "ballad",
    "coral",
    "echo",
    "fable",
    "nova",
    "onyx",
    "sage",
    "shimmer",
    "verse",
    "marin",
    "cedar",
)
"""Names of OpenAI's voices, which stand for the built-in voices in their order, again and again."""

PCM_RATE = 24_000  # Hz of OpenAI's `pcm`

FORMATS: Mapping[str, tuple[pb.AudioEncoding, str]] = {
    "mp3": (pb.AUDIO_ENCODING_MP3, "audio/mpeg"),
    "opus": (pb.AUDIO_ENCODING_OGG_OPUS, "audio/ogg"),
    "flac": (pb.AUDIO_ENCODING_FLAC, "audio/flac"),
    "wav": (pb.AUDIO_ENCODING_WAV, "audio/wav"),
    "pcm": (pb.AUDIO_ENCODING_PCM_S16LE, "audio/pcm"),
}
"""`response_format` to the encoding and the media type."""

TIMESTAMPS: Mapping[str, pb.TimestampGranularity] = {
    "none": pb.TIMESTAMP_GRANULARITY_UNSPECIFIED,
    "segment": pb.TIMESTAMP_GRANULARITY_SEGMENT,
    "word": pb.TIMESTAMP_GRANULARITY_WORD,
}

NAMES: Mapping[str, str] = {
    "config.model": "model",
    "config.lora": "model",
    "input": "input",
    "config.voice": "voice",
    "config.voice.language_code": "language",
    "config.voice.prompt": "ref_audio",
    "config.voice.prompt.transcript": "ref_text",
    "config.audio_format": "response_format",
    "config.audio_format.sample_rate_hertz": "sample_rate",
    "config.speaking_rate": "speed",
    "config.sampling.seed": "seed",
    "config.chunking": "chunk_size",
    "config.timestamps": "timestamps",
}
"""Fields of the contract by their names in JSON, for errors."""

SESSION_NAMES: Mapping[str, str] = {
    **{path.replace("config.", "config.synthesis.", 1): name for path, name in NAMES.items()},
    "config.max_text_delay": "max_text_delay",
    "config.idle_timeout": "idle_timeout",
    "config": "config",
    "input": "text",
    "flush.flush_id": "id",
}
"""The same for the messages of sessions."""

MAX_SECONDS = 86_400.0

SpeechFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]
ChunkSize = Annotated[int, Field(ge=1, le=MAX_CODES_PER_CHUNK)]


class VoiceReference(BaseModel):
    """Voice as `{"id": NAME}`."""

    model_config = ConfigDict(strict=True, frozen=True)

    id: str


class VoiceSettings(JsonBody):
    """JSON of how a text is spoken: OpenAI's fields, then ours."""

    model: str = ""
    voice: str | VoiceReference = ""
    instructions: str = ""
    speed: float = 1.0
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    language: str = ""
    timestamps: Literal["none", "segment", "word"] = "none"
    chunk_size: ChunkSize | Items[ChunkSize] = Field(default_factory=list)
    sample_rate: int = Field(default=0, ge=0, lt=2**31)
    ref_audio: str = ""
    ref_text: str = ""

    @property
    def ignored(self) -> list[str]:
        """Return the names of fields that have no effect."""
        unknown = list(self.model_extra or ())
        return ["instructions", *unknown] if self.instructions else unknown


class SpeechSettings(VoiceSettings):
    """JSON that requests and sessions share."""

    response_format: SpeechFormat = "mp3"

    @property
    def media_type(self) -> str:
        """Return the media type of the audio."""
        return FORMATS[self.response_format][1]

    def synthesis(self, synthesizer: Synthesizer) -> pb.SynthesisConfig:
        """Return the config of the wire contract; raises as `to_request` does."""
        return to_synthesis(self, self.response_format, synthesizer)


class SpeechBody(SpeechSettings):
    """JSON of a speech request."""

    input: str
    markup: Literal["ssml", "tags"] | None = None
    stream_format: Literal["audio", "sse", "json"] = "audio"


class SessionFrame(SpeechSettings):
    """JSON of a session's first message."""

    type: Literal["config"]
    audio: Literal["binary", "base64"] = "binary"
    max_text_delay: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    idle_timeout: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    eager: int = Field(default=0, ge=0, le=MAX_EAGER)


def to_request(body: SpeechBody, synthesizer: Synthesizer) -> pb.SynthesizeStreamRequest:
    """Return the message of the wire contract for a speech request.

    Raises InvalidRequestError for fields that do not go together, or broken base64.
    """
    if body.timestamps != "none" and body.stream_format == "audio":
        raise InvalidRequestError.of("timestamps", "needs stream_format sse or json")
    spoken = pb.SynthesisInput()
    setattr(spoken, body.markup or "text", body.input)
    return pb.SynthesizeStreamRequest(config=body.synthesis(synthesizer), input=spoken)


def to_session(frame: SessionFrame, synthesizer: Synthesizer) -> pb.StreamingSynthesizeRequest:
    """Return the first message of the wire contract for a session; raises as `to_request` does."""
    return pb.StreamingSynthesizeRequest(
        config=pb.StreamingSynthesizeConfig(
            synthesis=frame.synthesis(synthesizer),
            max_text_delay=to_duration(frame.max_text_delay),
            idle_timeout=to_duration(frame.idle_timeout),
            eager=frame.eager,
        )
    )


def to_synthesis(
    body: VoiceSettings, response_format: SpeechFormat, synthesizer: Synthesizer
) -> pb.SynthesisConfig:
    """Return the config of the wire contract; raises as `to_request` does."""
    model, lora = _model_and_adapter(body.model, synthesizer)
    rate = body.sample_rate or (PCM_RATE if response_format == "pcm" else 0)
    encoding = FORMATS[response_format][0]
    sizes = [body.chunk_size] if isinstance(body.chunk_size, int) else body.chunk_size
    return pb.SynthesisConfig(
        model=model,
        lora=lora,
        voice=_voice(body, synthesizer.voices),
        audio_format=pb.AudioFormat(encoding=encoding, sample_rate_hertz=rate),
        speaking_rate=body.speed,
        sampling=common_pb2.SamplingParams(seed=body.seed),
        chunking=pb.ChunkingConfig(chunk_sizes=sizes),
        timestamps=TIMESTAMPS[body.timestamps],
    )


def _model_and_adapter(name: str, synthesizer: Synthesizer) -> tuple[str, str]:
    """Return the model and the adapter that a name selects; "" for the served model."""
    settings = synthesizer.settings
    if name != settings.model and name in settings.adapters:
        return "", name
    return "" if name in OPENAI_MODELS else name, ""


def _voice(body: VoiceSettings, voices: VoiceRegistry) -> pb.VoiceSelection:
    if body.ref_audio:
        audio = decoded(body.ref_audio, "ref_audio")
        prompt = pb.VoicePrompt(audio=audio, transcript=body.ref_text)
        return pb.VoiceSelection(prompt=prompt, language_code=body.language)
    if body.ref_text:
        raise InvalidRequestError.of("ref_text", "needs ref_audio, the recording of it")
    name = body.voice if isinstance(body.voice, str) else body.voice.id
    return pb.VoiceSelection(name=voice_name(name, voices), language_code=body.language)


def voice_name(name: str, voices: VoiceRegistry) -> str:
    """Return the voice of a name; OpenAI's names stand for built-in voices where none has them."""
    if name not in OPENAI_VOICES:
        return name
    known = voices.voices()
    builtin = [voice.name for voice in known if voice.is_builtin]
    if not builtin or any(voice.name == name for voice in known):
        return name
    return builtin[OPENAI_VOICES.index(name) % len(builtin)]


def decoded(text: str, field: str) -> bytes:
    """Return the bytes of a base64 field. Raises InvalidRequestError when it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError.of(field, "must be base64 of a WAV, FLAC, Ogg or MP3") from None
