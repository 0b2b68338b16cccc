"""The values of speech synthesis: what a caller asks for and the events it gets back. All frozen.

SpeechRequest → Started, AudioChunk…, Done             (and in a session: FlushDone,
                                                        UtteranceCancelled)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from decoder import (
    MAX_SPEAKING_RATE,
    MIN_SPEAKING_RATE,
    AudioEncoding,
    AudioFormat,
    HeaderPatch,
    PrependPromptSpeechTokens,
    StreamingOptions,
    mask_policy,
)
from llm import FinishReason, SamplingParams
from tts.errors import FieldViolation, InvalidRequestError
from tts.text import SegmentMode, TextNormalization
from tts.voices import Voice

GAIN_DB = (-96.0, 16.0)
MAX_REQUEST_ID = 128
MAX_PRIORITY = 1000


class TimestampGranularity(Enum):
    """How finely a caller wants to know when what is said."""

    NONE = "none"
    SEGMENT = "segment"
    WORD = "word"


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """What a request says about sampling; None: as the model recommends.

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

    def violations(self) -> Iterator[FieldViolation]:
        """What is out of range, by proto field."""
        checks = (
            ("temperature", self.temperature, lambda v: 0 <= v <= 2, "must be in [0, 2]"),
            ("top_p", self.top_p, lambda v: 0 < v <= 1, "must be in (0, 1]"),
            ("top_k", self.top_k, lambda v: v >= 0, "must be 0 (off) or more"),
            ("min_p", self.min_p, lambda v: 0 <= v < 1, "must be in [0, 1)"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                lambda v: math.isfinite(v) and v > 0,
                "must be above 0 (1 = off)",
            ),
            ("frequency_penalty", self.frequency_penalty, _is_penalty, "must be in [-2, 2]"),
            ("presence_penalty", self.presence_penalty, _is_penalty, "must be in [-2, 2]"),
            ("repetition_window", self.repetition_window, lambda v: v >= 0, "must be 0 or more"),
            ("min_tokens", self.min_tokens, lambda v: v >= 0, "must be 0 or more"),
            ("max_tokens", self.max_tokens, lambda v: v >= 1, "must be 1 or more"),
            ("seed", self.seed, lambda v: 0 <= v < 2**64, "must be an unsigned 64-bit number"),
        )
        for name, value, holds, message in checks:
            if value is not None and not holds(value):
                yield FieldViolation(f"config.sampling.{name}", message)
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            yield FieldViolation("config.sampling.min_tokens", "must not exceed max_tokens")

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults with what was given; lengths and seed are left to the caller."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "penalty_window": self.repetition_window,
        }
        return replace(defaults, **{k: v for k, v in given.items() if v is not None})


def _is_penalty(value: float) -> bool:
    return abs(value) <= 2


@dataclass(frozen=True, slots=True)
class ChunkingOverrides:
    """What a request says about how its stream is cut; None: as the server is configured.

    `block_causal` and `prompt_causal` mean that earlier codes do not see the current block.
    """

    chunk_sizes: tuple[int, ...] | None = None
    buffer: int | None = None
    block_causal: bool | None = None
    prepend: PrependPromptSpeechTokens | None = None
    prompt_causal: bool | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is overridden."""
        return self != ChunkingOverrides()

    def over(self, defaults: StreamingOptions) -> StreamingOptions:
        """The defaults with what was given."""
        masks = defaults.masks
        block, prompt = not masks.buffer_sees_current, not masks.prompt_sees_current
        return StreamingOptions(
            chunk_sizes=defaults.chunk_sizes if self.chunk_sizes is None else self.chunk_sizes,
            buffer=defaults.buffer if self.buffer is None else self.buffer,
            masks=mask_policy(
                block_causal=block if self.block_causal is None else self.block_causal,
                prompt_causal=prompt if self.prompt_causal is None else self.prompt_causal,
            ),
            prepend=defaults.prepend if self.prepend is None else self.prepend,
            look_ahead=defaults.look_ahead,
            first_look_ahead=defaults.first_look_ahead,
        )


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One synthesis, checked: InvalidRequestError names every field that is out of range.

    A session's `text` is empty; its text arrives later.
    """

    text: str = ""
    voice: Voice | None = None  # None: the default voice
    encoding: AudioEncoding | None = None  # None: the server's raw format
    sample_rate: int = 0  # Hz; 0 = the codec's own, or the nearest the encoding has
    speaking_rate: float = 1.0
    gain_db: float = 0.0
    trim_silence: bool = False
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    chunking: ChunkingOverrides = field(default_factory=ChunkingOverrides)
    segment_mode: SegmentMode = SegmentMode.SENTENCE
    normalization: TextNormalization | None = None  # None: as the model was trained
    pronunciations: tuple[tuple[str, str], ...] = ()  # (phrase, plain respelling)
    max_audio_s: float | None = None
    request_id: str = ""  # made up when empty
    priority: int = 0
    carry: tuple[int, ...] | None = None  # () continues with no history; None starts afresh
    token_offset: int = 0  # codes that were spoken before, by the requests that this one continues
    timestamps: TimestampGranularity = TimestampGranularity.NONE
    lora: str = ""  # adapter; empty = the base model

    def __post_init__(self) -> None:
        violations = [*self._violations(), *self.sampling.violations()]
        if violations:
            raise InvalidRequestError(*violations)

    def _violations(self) -> Iterator[FieldViolation]:
        low, high = MIN_SPEAKING_RATE, MAX_SPEAKING_RATE
        if not low <= self.speaking_rate <= high:
            yield FieldViolation("config.speaking_rate", f"must be in [{low:g}, {high:g}]")
        if not GAIN_DB[0] <= self.gain_db <= GAIN_DB[1]:
            yield FieldViolation(
                "config.volume_gain_db", f"must be in [{GAIN_DB[0]:g}, {GAIN_DB[1]:g}]"
            )
        if self.max_audio_s is not None and not 0 < self.max_audio_s < math.inf:
            yield FieldViolation("config.max_audio_duration", "must be above 0")
        if len(self.request_id) > MAX_REQUEST_ID:
            yield FieldViolation("config.request_id", f"has more than {MAX_REQUEST_ID} characters")
        if abs(self.priority) > MAX_PRIORITY:
            yield FieldViolation("config.priority", f"must be in ±{MAX_PRIORITY}")


@dataclass(frozen=True, slots=True)
class Started:
    """Always first: what will really be sent."""

    request_id: str
    model: str
    audio_format: AudioFormat
    seed: int


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """Encoded audio, in order and without seams.

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
    """When a word of the input is spoken: seconds from the start of the output."""

    word: str
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole input
    text_end: int


@dataclass(frozen=True, slots=True)
class WordTimes:
    """Words that have been spoken, in order; those of a segment come with or behind its audio."""

    words: tuple[WordTime, ...]


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """When a segment of the text was spoken: seconds from the start of the output.

    Comes when the segment has ended; silence that is trimmed off the end does not count.
    """

    index: int
    start_s: float
    end_s: float
    text_start: int  # Unicode code points into the whole input
    text_end: int


@dataclass(frozen=True, slots=True)
class SpeechUsage:
    """What a request cost."""

    input_characters: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    audio_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeechTimings:
    """Seconds; queue and prefill are those of the first segment."""

    queue_s: float | None = None
    prefill_s: float | None = None
    first_audio_s: float | None = None  # since the request was taken up
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SynthesisResult:
    """How a request ended. `header_patches` are for who still holds the whole output."""

    finish_reason: FinishReason
    usage: SpeechUsage
    timings: SpeechTimings
    warnings: tuple[str, ...] = ()
    header_patches: tuple[HeaderPatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Always last."""

    result: SynthesisResult


@dataclass(frozen=True, slots=True)
class FlushDone:
    """Everything fed before this flush has been spoken and sent."""

    flush_id: str
    sample_offset: int


@dataclass(frozen=True, slots=True)
class UtteranceCancelled:
    """What was fed before is dropped; no audio of it follows."""

    sample_offset: int


@dataclass(frozen=True, slots=True)
class SynthesizedSpeech:
    """A whole synthesis at once. `audio` states its length where its container can."""

    audio: bytes
    started: Started
    chunks: tuple[AudioChunk, ...]  # without their data
    result: SynthesisResult
    words: tuple[WordTime, ...] = ()  # where they were asked for
    segments: tuple[SegmentTime, ...] = ()  # likewise


SpokenEvent = AudioChunk | WordTimes | SegmentTime
SpeechEvent = Started | SpokenEvent | Done
SessionEvent = Started | SpokenEvent | FlushDone | UtteranceCancelled | Done
