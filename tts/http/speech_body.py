"""The one table from the JSON of speech requests to the messages of the wire contract."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

from pydantic import Field

from tts.errors import InvalidRequestError
from tts.http.exchange import Items, JsonBody, JsonPart
from tts.server.wire.common import Violations, to_duration
from tts.server.wire.speech import MAX_CODES_PER_CHUNK
from tts.speech.synthesizer import Synthesizer
from tts.text.markup.dialogue import MAX_TURNS
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


class SpeechNames(Protocol):
    """Names that requests for speech may use: of a synthesizer, or of another server."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its adapters."""

    @property
    def times_words(self) -> bool:
        """Whether it can tell when each word is spoken."""

    @property
    def takes_instructions(self) -> bool:
        """Whether the model reads how a text is to be spoken, in words."""

    @property
    def voices(self) -> VoiceRegistry:
        """Its voices."""


PCM_RATE = 24_000  # Hz of OpenAI's `pcm`

FORMATS: Mapping[str, tuple[pb.AudioEncoding, str]] = {
    "mp3": (pb.AUDIO_ENCODING_MP3, "audio/mpeg"),
    "opus": (pb.AUDIO_ENCODING_OGG_OPUS, "audio/ogg"),
    "flac": (pb.AUDIO_ENCODING_FLAC, "audio/flac"),
    "wav": (pb.AUDIO_ENCODING_WAV, "audio/wav"),
    "pcm": (pb.AUDIO_ENCODING_PCM_S16LE, "audio/pcm"),
}
"""`response_format` to the encoding and the media type."""

ALPHABETS: Mapping[str, pb.PronunciationAlphabet] = {
    "letters": pb.PRONUNCIATION_ALPHABET_UNSPECIFIED,
    "ipa": pb.PRONUNCIATION_ALPHABET_IPA,
    "arpabet": pb.PRONUNCIATION_ALPHABET_ARPABET,
}

TIMESTAMPS: Mapping[str, pb.TimestampGranularity] = {
    "none": pb.TIMESTAMP_GRANULARITY_UNSPECIFIED,
    "segment": pb.TIMESTAMP_GRANULARITY_SEGMENT,
    "word": pb.TIMESTAMP_GRANULARITY_WORD,
}
CHECKS: Mapping[bool | None, pb.SpeechCheck] = {
    None: pb.SPEECH_CHECK_UNSPECIFIED,
    False: pb.SPEECH_CHECK_OFF,
    True: pb.SPEECH_CHECK_ON,
}

NAMES: Mapping[str, str] = {
    "config.model": "model",
    "config.lora": "model",
    "input": "input",
    "input.dialogue": "turns",
    "input.dialogue.turns": "turns",
    "input.dialogue.pause": "pause",
    "config.voice": "voice",
    "config.voice.language_code": "language",
    "config.voice.prompt": "ref_audio",
    "config.voice.prompt.transcript": "ref_text",
    "config.audio_format": "response_format",
    "config.audio_format.sample_rate_hertz": "sample_rate",
    "config.speaking_rate": "speed",
    "config.pitch": "pitch",
    "config.sampling.seed": "seed",
    "config.chunking": "chunk_size",
    "config.timestamps": "timestamps",
    "config.pronunciations": "pronunciations",
    "config.speech_check": "check",
}
"""Fields of the contract by their names in JSON, for errors."""

SESSION_NAMES: Mapping[str, str] = {
    **{path.replace("config.", "config.synthesis.", 1): name for path, name in NAMES.items()},
    "config.max_text_delay": "max_text_delay",
    "config.idle_timeout": "idle_timeout",
    "config.eager": "eager",
    "config": "config",
    "input": "text",
    "flush.flush_id": "id",
}
"""The same for the messages of sessions."""

MAX_SECONDS = 86_400.0

SpeechFormat = Literal["mp3", "opus", "flac", "wav", "pcm"]
ChunkSize = Annotated[int, Field(ge=1, le=MAX_CODES_PER_CHUNK)]


class VoiceReference(JsonPart):
    """Voice as `{"id": NAME}`."""

    id: str


class PronunciationItem(JsonPart):
    """Phrase, and what is spoken in its place."""

    phrase: str
    pronunciation: str
    alphabet: Literal["letters", "ipa", "arpabet"] = "letters"

    def to_proto(self) -> pb.Pronunciation:
        """Return the message of the wire contract."""
        return pb.Pronunciation(
            phrase=self.phrase,
            pronunciation=self.pronunciation,
            alphabet=ALPHABETS[self.alphabet],
        )


class VoiceChoice(JsonBody):
    """JSON of a voice: a name, a language, or a recording."""

    voice: str | VoiceReference = ""
    language: str = ""
    ref_audio: str = ""
    ref_text: str = ""


class VoiceSettings(VoiceChoice):
    """JSON of how a text is spoken: OpenAI's fields, then ours."""

    model: str = ""
    instructions: str = ""
    speed: float = 1.0
    pitch: float = 0.0
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    timestamps: Literal["none", "segment", "word"] = "none"
    chunk_size: ChunkSize | Items[ChunkSize] = Field(default_factory=list)
    sample_rate: int = Field(default=0, ge=0, lt=2**31)
    pronunciations: Items[PronunciationItem] = Field(default_factory=list)
    check: bool | None = None

    def ignored_by(self, names: SpeechNames) -> list[str]:
        """Return the names of fields that have no effect on a model."""
        unknown = list(self.model_extra or ())
        is_ignored = self.instructions and not names.takes_instructions
        return ["instructions", *unknown] if is_ignored else unknown


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


class Turn(VoiceChoice):
    """JSON of a turn of a dialogue."""

    text: str
    instructions: str = ""


class SpeechBody(SpeechSettings):
    """JSON of a speech request: a text, or the turns of a dialogue."""

    input: str | None = None
    turns: Annotated[Items[Turn], Field(max_length=MAX_TURNS)] | None = None
    pause: float | None = None
    markup: Literal["ssml", "tags"] | None = None
    stream_format: Literal["audio", "sse", "json"] = "audio"

    def ignored_by(self, names: SpeechNames) -> list[str]:
        """See `VoiceSettings`."""
        found = super().ignored_by(names)
        are_asked = any(turn.instructions for turn in self.turns or ())
        if are_asked and not names.takes_instructions and "instructions" not in found:
            return ["instructions", *found]
        return found


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
    config = body.synthesis(synthesizer)
    return pb.SynthesizeStreamRequest(config=config, input=_input(body, synthesizer))


def _input(body: SpeechBody, names: SpeechNames) -> pb.SynthesisInput:
    """Return the text of a request, or its dialogue."""
    if body.turns is None:
        with Violations() as wrong:
            wrong.require(body.input is not None, "input", "is required, or turns")
            wrong.require(body.pause is None, "pause", "is for turns")
        spoken = pb.SynthesisInput()
        setattr(spoken, body.markup or "text", body.input)
        return spoken
    with Violations() as wrong:
        wrong.require(body.input is None, "input", "cannot be combined with turns")
        wrong.require(body.markup is None, "markup", "is for input; the text of turns is plain")
        pause = body.pause or 0.0
        wrong.require(abs(pause) <= MAX_SECONDS, "pause", "is too long")
    return pb.SynthesisInput(
        dialogue=pb.Dialogue(
            turns=[_turn(turn, f"turns[{n}]", names) for n, turn in enumerate(body.turns)],
            pause=to_duration(body.pause),
        )
    )


def _turn(turn: Turn, path: str, names: SpeechNames) -> pb.DialogueTurn:
    """Return a turn; one without a voice has that of the request."""
    instructions = turn.instructions if names.takes_instructions else ""
    is_chosen = bool(turn.voice or turn.language or turn.ref_audio or turn.ref_text)
    voice = _voice(turn, names.voices, f"{path}.") if is_chosen else None
    return pb.DialogueTurn(text=turn.text, voice=voice, instructions=instructions)


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
    body: VoiceSettings, response_format: SpeechFormat, names: SpeechNames
) -> pb.SynthesisConfig:
    """Return the config of the wire contract; raises as `to_request` does."""
    model, lora = _model_and_adapter(body.model, names)
    rate = body.sample_rate or (PCM_RATE if response_format == "pcm" else 0)
    encoding = FORMATS[response_format][0]
    sizes = [body.chunk_size] if isinstance(body.chunk_size, int) else body.chunk_size
    return pb.SynthesisConfig(
        model=model,
        lora=lora,
        voice=_voice(body, names.voices),
        instructions=body.instructions if names.takes_instructions else "",
        audio_format=pb.AudioFormat(encoding=encoding, sample_rate_hertz=rate),
        speaking_rate=body.speed,
        pitch=body.pitch,
        sampling=common_pb2.SamplingParams(seed=body.seed),
        chunking=pb.ChunkingConfig(chunk_sizes=sizes),
        timestamps=TIMESTAMPS[body.timestamps],
        pronunciations=[item.to_proto() for item in body.pronunciations],
        speech_check=CHECKS[body.check],
    )


def _model_and_adapter(name: str, names: SpeechNames) -> tuple[str, str]:
    """Return the model and the adapter that a name selects; "" for the served model."""
    if name != names.model and name in names.adapters:
        return "", name
    return "" if name in OPENAI_MODELS else name, ""


def _voice(body: VoiceChoice, voices: VoiceRegistry, path: str = "") -> pb.VoiceSelection:
    """Return the voice of a request, or of a turn, whose fields are below `path`."""
    if body.ref_audio:
        audio = decoded(body.ref_audio, f"{path}ref_audio")
        prompt = pb.VoicePrompt(audio=audio, transcript=body.ref_text)
        return pb.VoiceSelection(prompt=prompt, language_code=body.language)
    if body.ref_text:
        raise InvalidRequestError.of(f"{path}ref_text", "needs ref_audio, the recording of it")
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
        raise InvalidRequestError.of(field, "must be base64 of a WAV, FLAC or Ogg") from None
