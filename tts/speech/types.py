"""Values of speech synthesis: requests, and the events of their results. All frozen.

SpeechRequest → Started, AudioChunk…, Done             (and in a session: FlushDone,
                                                        UtteranceCancelled)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, TypeVar

from decoder import (
    MAX_SPEAKING_RATE,
    MIN_SPEAKING_RATE,
    AudioEncoding,
    AudioFormat,
    HeaderPatch,
    MaskPolicy,
    PrependPromptSpeechTokens,
    StreamingOptions,
)
from llm import FinishReason, SamplingParams
from tts.errors import FieldViolation, InvalidRequestError
from tts.speech.check import CheckResult
from tts.text.clean import TextError, check_text
from tts.text.lexicon.entries import Pronunciation
from tts.text.markup.document import Document, MarkKind
from tts.text.segmenter import SegmentMode, TextNormalization
from tts.voices.types import Voice

GAIN_DB = (-96.0, 16.0)
PITCH = (-12.0, 12.0)  # semitones
MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000
COUNTED = ("min_tokens", "max_tokens", "seed")  # those of the whole request, see `overridden`

T = TypeVar("T")


class TimestampGranularity(Enum):
    """Granularity of the times that a request returns."""

    NONE = "none"
    SEGMENT = "segment"
    WORD = "word"


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """Sampling parameters of a request; None: the model's default.

    `max_tokens` and `min_tokens` count the speech tokens of the whole request.
    """

    temperature: float | None = None  # [0, 2]; 0 = argmax
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_window: int | None = None  # 0 = whole output
    min_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """Return those that are not None, by name."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in values if value is not None}


def _is_penalty(value: float) -> bool:
    return abs(value) <= 2


SAMPLING_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda v: 0 <= v <= 2, "must be in [0, 2]"),
    ("top_p", lambda v: 0 < v <= 1, "must be in (0, 1]"),
    ("top_k", lambda v: v >= 0, "must be 0 (off) or more"),
    ("min_p", lambda v: 0 <= v < 1, "must be in [0, 1)"),
    ("repetition_penalty", lambda v: math.isfinite(v) and v > 0, "must be above 0 (1 = off)"),
    ("frequency_penalty", _is_penalty, "must be in [-2, 2]"),
    ("presence_penalty", _is_penalty, "must be in [-2, 2]"),
    ("repetition_window", lambda v: v >= 0, "must be 0 or more"),
    ("min_tokens", lambda v: v >= 0, "must be 0 or more"),
    ("max_tokens", lambda v: v >= 1, "must be 1 or more"),
    ("seed", lambda v: 0 <= v < 2**64, "must be an unsigned 64-bit number"),
)
"""Fields of `SamplingOverrides` with their ranges, and the errors of values outside."""


def sampling_violations(given: Mapping[str, Any], path: str) -> Iterator[FieldViolation]:
    """Yield the `given` fields of `SamplingOverrides` that are out of range.

    `path` is the field path of the sampling parameters.
    """
    for name, holds, message in SAMPLING_RANGES:
        if name in given and not holds(given[name]):
            yield FieldViolation(f"{path}.{name}", message)
    if "max_tokens" in given and given.get("min_tokens", 0) > given["max_tokens"]:
        yield FieldViolation(f"{path}.min_tokens", "must not exceed max_tokens")


def overridden(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return the defaults with the `given` fields of `SamplingOverrides`.

    The caller sets lengths and seed. What is given holds for all codebooks, also where the model
    has defaults for the later ones.
    """
    drawn = {name: value for name, value in given.items() if name not in COUNTED}
    if "repetition_window" in drawn:
        drawn["penalty_window"] = drawn.pop("repetition_window")
    later = defaults.later_codes
    if later is not None:
        names = {field.name for field in fields(later)} & drawn.keys()
        drawn["later_codes"] = replace(later, **{name: drawn[name] for name in names})
    return replace(defaults, **drawn) if drawn else defaults


@dataclass(frozen=True, slots=True)
class ChunkingOverrides:
    """Chunking options of a request; None: the server's default.

    With `block_causal` and `prepend_prompt_speech_tokens_causal` earlier codes do not attend to the
    current block.
    """

    chunk_sizes: tuple[int, ...] | None = None
    buffer: int | None = None
    block_causal: bool | None = None
    prepend: PrependPromptSpeechTokens | None = None
    prepend_prompt_speech_tokens_causal: bool | None = None

    def over(self, defaults: StreamingOptions) -> StreamingOptions:
        """Return the defaults with these overrides."""
        masks = defaults.masks

        def chosen(given: T | None, default: T) -> T:
            return default if given is None else given

        return replace(
            defaults,
            chunk_sizes=chosen(self.chunk_sizes, defaults.chunk_sizes),
            buffer=chosen(self.buffer, defaults.buffer),
            masks=MaskPolicy(
                chosen(self.block_causal, masks.block_causal),
                chosen(
                    self.prepend_prompt_speech_tokens_causal,
                    masks.prepend_prompt_speech_tokens_causal,
                ),
            ),
            prepend=chosen(self.prepend, defaults.prepend),
        )


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Request for one synthesis. Raises InvalidRequestError, naming every field out of range.

    A session's `text` is empty; its text arrives later. `path` is the field path of the synthesis
    configuration in the request's message, which errors name.
    """

    text: str = ""
    markup: Document | None = None  # parts of `text`, if it is a source with markup
    voice: Voice | None = None  # None: the default voice
    cast: Mapping[str, Voice] = field(default_factory=dict)  # voices that only `markup` names
    encoding: AudioEncoding | None = None  # None: the server's raw format
    sample_rate: int = 0  # Hz; 0 = the codec's rate, or the encoding's nearest
    speaking_rate: float = 1.0
    gain_db: float = 0.0
    pitch: float = 0.0  # semitones above the voice's own
    trim_silence: bool = False
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    chunking: ChunkingOverrides | None = None  # None: the server's default
    segment_mode: SegmentMode = SegmentMode.SENTENCE
    normalization: TextNormalization | None = None  # None: the model's default
    pronunciations: tuple[Pronunciation, ...] = ()
    max_audio_s: float | None = None
    request_id: str = ""  # generated if empty
    priority: int = 0
    carry: tuple[int, ...] | None = None  # () continues without history; None: a new stream
    token_offset: int = 0  # codes spoken by the requests that this one continues
    timestamps: TimestampGranularity = TimestampGranularity.NONE
    lora: str = ""  # adapter; empty = the base model
    check: bool | None = (
        None  # speak segments again that differ from their text; None: whole audio only
    )
    eager: int = 0  # of a session; see `TextOptions`
    path: str = "config"

    def __post_init__(self) -> None:
        sampling = sampling_violations(self.sampling.given(), f"{self.path}.sampling")
        violations = [*self._violations(), *sampling]
        if violations:
            raise InvalidRequestError(*violations)

    def _violations(self) -> Iterator[FieldViolation]:
        try:
            check_text(self.text, field="input.text")
        except TextError as error:
            yield from error.violations
        path, low, high = self.path, MIN_SPEAKING_RATE, MAX_SPEAKING_RATE
        if not low <= self.speaking_rate <= high:
            yield FieldViolation(f"{path}.speaking_rate", f"must be in [{low:g}, {high:g}]")
        if not GAIN_DB[0] <= self.gain_db <= GAIN_DB[1]:
            yield FieldViolation(
                f"{path}.volume_gain_db", f"must be in [{GAIN_DB[0]:g}, {GAIN_DB[1]:g}]"
            )
        if not PITCH[0] <= self.pitch <= PITCH[1]:
            yield FieldViolation(f"{path}.pitch", f"must be in [{PITCH[0]:g}, {PITCH[1]:g}]")
        if self.max_audio_s is not None and not 0 < self.max_audio_s < math.inf:
            yield FieldViolation(f"{path}.max_audio_duration", "must be above 0")
        if len(self.request_id) > MAX_REQUEST_ID:
            yield FieldViolation(f"{path}.request_id", f"has more than {MAX_REQUEST_ID} characters")
        if abs(self.priority) > MAX_PRIORITY:
            yield FieldViolation(f"{path}.priority", f"must be in ±{MAX_PRIORITY}")


@dataclass(frozen=True, slots=True)
class Started:
    """First event: the audio format and the seed."""

    request_id: str
    model: str
    audio_format: AudioFormat
    seed: int


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Encoded audio, in order and without gaps.

    Samples are counted at the output rate, as they go into the encoder: `sample_count` belongs to
    `data` exactly for headerless formats and WAV, and up to what a compressing encoder holds back
    (100 ms) for others. Codes are counted over the whole request, but for `next_token_offset`.
    """

    data: bytes
    sequence: int
    sample_offset: int
    sample_count: int
    segment_index: int
    text_start: int  # Unicode code points into the whole input
    text_end: int
    token_offset: int
    token_count: int
    carry: tuple[int, ...] = ()  # last `buffer` codes, for a request that continues this one
    next_token_offset: int = 0  # and its `token_offset`


@dataclass(frozen=True, slots=True)
class WordTime:
    """Time of a spoken word: seconds from the start of the output."""

    word: str
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole input
    text_end: int


@dataclass(frozen=True, slots=True)
class WordTimes:
    """Times of spoken words, in order; they follow or accompany their segment's audio."""

    words: tuple[WordTime, ...]


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """Time of a spoken segment: seconds from the start of the output.

    Sent when the segment has ended; trimmed silence at its end does not count.
    """

    index: int
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole input
    text_end: int


@dataclass(frozen=True, slots=True)
class MarkTime:
    """Time of a mark, a sentence or a turn of a document: seconds from the start of the output.

    It is where the audio behind the mark begins, or the end of the output if there is none.
    `name` is that of a mark, or of a turn's voice; "" for a sentence.
    """

    kind: MarkKind
    name: str
    time_s: float
    text_start: int  # Unicode code points into the whole input
    text_end: int


@dataclass(frozen=True, slots=True)
class SpeechUsage:
    """Usage of a request."""

    input_characters: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    audio_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeechTimings:
    """Timings of a request in seconds; queue and prefill are those of the first segment."""

    queue_s: float | None = None
    prefill_s: float | None = None
    first_audio_s: float | None = None  # since processing started
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SynthesisResult:
    """Result of a request. `header_patches` correct the header of the whole output; `spoken_text`
    joins the normalised texts of its segments; `pronunciations` are those that were applied.
    `checks` has the results of all attempts of each segment that was checked.
    """

    finish_reason: FinishReason
    usage: SpeechUsage
    timings: SpeechTimings
    warnings: tuple[str, ...] = ()
    header_patches: tuple[HeaderPatch, ...] = ()
    spoken_text: str = ""
    pronunciations: tuple[Pronunciation, ...] = ()
    checks: tuple[tuple[CheckResult, ...], ...] = ()
    num_retried_segments: int = 0  # spoken again, as a check had failed


@dataclass(frozen=True, slots=True)
class Done:
    """Last event."""

    result: SynthesisResult


@dataclass(frozen=True, slots=True)
class FlushDone:
    """Event after all text that was fed before a flush has been spoken and sent."""

    flush_id: str
    sample_offset: int


@dataclass(frozen=True, slots=True)
class UtteranceCancelled:
    """Event after a cancellation: earlier text is dropped, and no audio of it follows."""

    sample_offset: int


@dataclass(frozen=True, slots=True)
class SynthesizedSpeech:
    """Whole synthesis. The container of `audio` states its length if it can."""

    audio: bytes
    started: Started
    chunks: tuple[AudioChunk, ...]  # without their data
    result: SynthesisResult
    words: tuple[WordTime, ...] = ()  # if requested
    segments: tuple[SegmentTime, ...] = ()  # if requested
    marks: tuple[MarkTime, ...] = ()


SpokenEvent = AudioChunk | WordTimes | SegmentTime
SpeechEvent = Started | SpokenEvent | MarkTime | Done
SessionEvent = Started | SpokenEvent | FlushDone | UtteranceCancelled | Done
