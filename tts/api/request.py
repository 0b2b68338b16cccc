"""Options of the Python API as a `SpeechRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypedDict, TypeVar

from decoder import AudioEncoding, PrependPromptSpeechTokens
from tts.errors import InvalidRequestError
from tts.speech.types import (
    ChunkingOverrides,
    SamplingOverrides,
    SpeechRequest,
    TimestampGranularity,
)
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.text.markup.dialogue import DialogueTurn, read_dialogue
from tts.text.markup.document import Document
from tts.text.markup.ssml import read_ssml
from tts.text.markup.tags import read_tags

Choice = TypeVar("Choice", bound=Enum)


class SpeechOptions(TypedDict, total=False):
    """Keyword arguments of `say` and `stream`. What is left out is as the voice recommends."""

    markup: Literal["ssml", "tags"]
    """The text is SSML, or has tags."""
    pause_s: float
    """Seconds between two turns of a dialogue, 0 to 10; default: 0.4."""
    voice: str
    """Name of a voice, see `LoadedVoice.voices`, or a blend such as "hazel(2)+owen(1)"."""
    language: str
    """BCP-47 code, such as "en-US": chooses a voice where none is named."""
    instructions: str
    """Style in words, for models that read it."""
    seed: int
    """Unsigned 64-bit number; the same seed gives the same speech. Default: random."""
    temperature: float
    """0 to 2; 0 takes the likeliest token."""
    top_p: float
    """Above 0, at most 1."""
    top_k: int
    """0 turns it off."""
    max_tokens: int
    """Most speech tokens of the whole request."""
    speaking_rate: float
    """0.25 to 4; 1 is normal."""
    gain_db: float
    """-96 to 16 dB; default 0."""
    pitch: float
    """-12 to 12 semitones above the voice's own; default 0. For codecs that predict the pitch."""
    trim_silence: bool
    """Leave out silence before the first and after the last word."""
    sample_rate: int
    """Hz, 8,000 to 192,000; default: the codec's own."""
    max_audio_s: float
    """Most seconds of audio."""
    timestamps: Literal["segment", "word"]
    """Report when each segment of the text, or each word, is spoken."""
    pronunciations: Mapping[str, str]
    """Phrase to a respelling in plain letters, before those of the voice and of the lexicons."""
    phonemes: Mapping[str, str]
    """Phrase to its phonemes in IPA; a model that reads letters gets the nearest respelling."""
    chunk_size: Sequence[int]
    """Speech tokens per block of audio; the last size repeats."""
    buffer: int
    """Earlier speech tokens that are decoded again in front of each block."""
    block_causal: bool
    """Earlier tokens do not see the new block."""
    prepend_prompt_speech_tokens: Literal["never", "once", "rolling"]
    """When the voice prompt's tokens go in front of a block."""
    prepend_prompt_speech_tokens_causal: bool
    """The prompt's tokens do not see the new block."""
    priority: int
    """-1,000 to 1,000; a level is worth five seconds of waiting."""
    lora: str
    """Name of an adapter."""
    check: bool
    """Compare every segment with its text before it is sent, and speak it again if words are
    missing or doubled, which delays the first sound. Default: in `say`, if the model has word
    timings; not in `stream`."""


MARKUP: Mapping[str, Callable[[str], Document]] = {"ssml": read_ssml, "tags": read_tags}
SAMPLING_FIELDS = ("seed", "temperature", "top_p", "top_k", "max_tokens")
VOICE_FIELDS = ("voice", "language", "instructions")
REQUEST_FIELDS = (
    "speaking_rate",
    "gain_db",
    "pitch",
    "trim_silence",
    "sample_rate",
    "max_audio_s",
    "priority",
    "lora",
    "check",
)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A text to speak, checked; its voice is chosen where the voices are."""

    request: SpeechRequest
    voice: str = ""
    language: str = ""
    instructions: str = ""

    @classmethod
    def read(cls, text: str | Sequence[DialogueTurn], options: SpeechOptions) -> CheckedRequest:
        """Options as a request for float32 samples.

        Raises `InvalidRequestError` with every value that is out of range, and `TypeError` for an
        option that does not exist.
        """
        unknown = sorted(options.keys() - SpeechOptions.__annotations__.keys())
        if unknown:
            raise TypeError(f"unknown options: {', '.join(unknown)}")
        given: Mapping[str, Any] = dict(options)
        level = options.get("timestamps", TimestampGranularity.NONE.value)
        request = SpeechRequest(
            **_text(text, options),
            encoding=AudioEncoding.PCM_F32LE,
            sampling=SamplingOverrides(**_those(SAMPLING_FIELDS, given)),
            chunking=_chunking(options),
            pronunciations=_pronunciations(options),
            timestamps=_choice(TimestampGranularity, "timestamps", level),
            **_those(REQUEST_FIELDS, given),
        )
        return cls(request, **_those(VOICE_FIELDS, given))


def _text(text: str | Sequence[DialogueTurn], options: SpeechOptions) -> dict[str, Any]:
    """Return the fields of a request for its text, with a document for markup and turns."""
    kind = options.get("markup")
    if not isinstance(text, str):
        if kind is not None:
            raise InvalidRequestError.of("markup", "is for a text; that of turns is plain")
        document = read_dialogue(text, options.get("pause_s"))
        return {"text": document.source, "markup": document}
    if "pause_s" in options:
        raise InvalidRequestError.of("pause_s", "is for the turns of a dialogue")
    if kind is None:
        return {"text": text}
    if kind not in MARKUP:
        known = ", ".join(map(repr, MARKUP))
        raise InvalidRequestError.of("markup", f"{kind!r} must be one of {known}")
    return {"text": text, "markup": MARKUP[kind](text)}


def _pronunciations(options: SpeechOptions) -> tuple[Pronunciation, ...]:
    given = (
        (options.get("pronunciations", {}), Alphabet.LETTERS),
        (options.get("phonemes", {}), Alphabet.IPA),
    )
    return tuple(
        Pronunciation(phrase, spoken, alphabet)
        for pairs, alphabet in given
        for phrase, spoken in pairs.items()
    )


def _chunking(options: SpeechOptions) -> ChunkingOverrides | None:
    name = "prepend_prompt_speech_tokens"
    prepend = options.get("prepend_prompt_speech_tokens")
    given = ChunkingOverrides(
        chunk_sizes=tuple(options["chunk_size"]) if "chunk_size" in options else None,
        buffer=options.get("buffer"),
        block_causal=options.get("block_causal"),
        prepend=None if prepend is None else _choice(PrependPromptSpeechTokens, name, prepend),
        prepend_prompt_speech_tokens_causal=options.get("prepend_prompt_speech_tokens_causal"),
    )
    return None if given == ChunkingOverrides() else given


def _choice(kind: type[Choice], name: str, value: str) -> Choice:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(member.value) for member in kind)
        raise InvalidRequestError.of(name, f"{value!r} must be one of {known}") from None


def _those(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}
