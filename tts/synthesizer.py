"""Text in, audio out: a `SpeechRequest` becomes language-model calls, their codes become chunks.

    text → segments ─▶ SpeechStream.speak, one after the other ─▶ Started, AudioChunk…, Done

Streamed and unary are the same chunks; a session is the same with text that is still to come.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from uuid import uuid4

from decoder import (
    AudioEncoding,
    AudioFormat,
    AudioFormatError,
    CodecSpec,
    DecoderConfigError,
    StreamingOptions,
    apply_patches,
    check_output_format,
    nearest_rate,
    supported_encodings,
    validate_streaming,
)
from llm import SamplingParams
from tts.aligner import Aligner
from tts.audio import AudioShape
from tts.cloning import CloningLimits, VoiceCloner
from tts.engine_client import EngineClient
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    NotAvailableError,
    Precondition,
    PreconditionError,
)
from tts.families.base import FamilyTraits
from tts.prompt import PromptBuilder
from tts.session import SessionTimes, StreamingSession
from tts.speech import (
    AudioChunk,
    ChunkingOverrides,
    Done,
    FlushDone,
    SamplingOverrides,
    SegmentTime,
    SessionEvent,
    SpeechEvent,
    SpeechRequest,
    SpeechTimings,
    SpeechUsage,
    Started,
    SynthesisResult,
    SynthesizedSpeech,
    TimestampGranularity,
    UtteranceCancelled,
    WordTime,
    WordTimes,
)
from tts.text import SegmentStream, TextOptions, TextSegment, check_text
from tts.utterance import SpeechPlan, SpeechStream, closing
from tts.voices import Voice, VoiceRegistry

__all__ = [
    "AudioChunk",
    "ChunkingOverrides",
    "Done",
    "FlushDone",
    "SamplingOverrides",
    "SessionEvent",
    "SessionTimes",
    "SpeechEvent",
    "SpeechRequest",
    "SpeechTimings",
    "SpeechUsage",
    "Started",
    "StreamingSession",
    "SynthesisResult",
    "SynthesisSettings",
    "SynthesizedSpeech",
    "Synthesizer",
    "TimestampGranularity",
    "UtteranceCancelled",
]

FEED_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class SynthesisSettings:
    """What the server decides for all requests.

    `traits` are the speech family's: they bound one language-model call; `max_seq_len` is the
    model's context; `max_audio_s` bounds the audio of one call; `raw_encoding` is what a
    request gets that names no encoding.
    """

    model: str = ""
    streaming: StreamingOptions = field(default_factory=StreamingOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    traits: FamilyTraits = field(default_factory=FamilyTraits)
    max_seq_len: int | None = None
    max_audio_s: float = 600.0
    raw_encoding: AudioEncoding = AudioEncoding.PCM_S16LE
    cloning: CloningLimits = field(default_factory=CloningLimits)
    adapters: tuple[str, ...] = ()  # that requests can name
    aligner: Path | None = None  # folder of what finds the words in the codes


class Synthesizer:
    """Speaks requests through an engine. One event loop; any number of requests at once."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptBuilder,
        voices: VoiceRegistry,
        settings: SynthesisSettings | None = None,
    ) -> None:
        if client.codec is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        self.codec: CodecSpec = client.codec
        self.voices = voices
        self.settings = settings or SynthesisSettings()
        self.cloner = VoiceCloner(
            client, prompts, self._cloning_limits(), self.settings.traits.text_options()
        )
        self._client, self._prompts = client, prompts
        self._loaded_aligner: Aligner | None = None

    def _cloning_limits(self) -> CloningLimits:
        """A voice must leave room for the longest text and the longest speech of one call."""
        settings = self.settings
        limits = settings.cloning
        if settings.max_seq_len is None or limits.max_prompt_tokens is not None:
            return limits
        traits = settings.traits
        text_tokens = traits.max_characters * traits.tokens_per_character + 1
        room = settings.max_seq_len - text_tokens - traits.max_codes
        return replace(limits, max_prompt_tokens=max(room, 0))

    async def stream(self, request: SpeechRequest) -> AsyncGenerator[SpeechEvent, None]:
        """Started, then audio as it is made, then Done. Closing the iterator cancels the request.

        Raises InvalidRequestError, PreconditionError or NotAvailableError before Started, and
        SynthesisError when the engine fails on the way.
        """
        if not request.text.strip():
            raise InvalidRequestError.of("input.text", "is empty")
        voice = await self.cloner.ready(request.voice or self.voices.default)
        plan = self._plan(replace(request, voice=voice))
        check_text(request.text)
        text = SegmentStream(self._text_options(request, plan.voice))
        segments = _segments(request.text, text)
        first = [*islice(segments, 1)]  # text that cannot be spoken at all is refused by now
        speech = self._speech(request, plan)
        yield self._started(plan)
        for segment in chain(first, segments):
            if speech.is_exhausted:
                break
            async with closing(speech.speak(segment)) as chunks:
                async for chunk in chunks:
                    yield chunk
        async for chunk in speech.finish():
            yield chunk
        if not speech.num_segments:
            speech.warn("the text holds nothing that can be spoken")
        speech.warn_of_lost(text.num_lost)
        yield Done(speech.result(len(request.text)))

    async def synthesize(self, request: SpeechRequest) -> SynthesizedSpeech:
        """The same, all at once: the samples are those of `stream` for the same seed."""
        started: Started | None = None
        data: list[bytes] = []
        chunks: list[AudioChunk] = []
        words: list[WordTime] = []
        segments: list[SegmentTime] = []
        async with closing(self.stream(request)) as events:
            async for event in events:
                match event:
                    case Started():
                        started = event
                    case AudioChunk():
                        data.append(event.data)
                        chunks.append(replace(event, data=b""))
                    case WordTimes():
                        words += event.words
                    case SegmentTime():
                        segments.append(event)
                    case Done(result):
                        break
        assert started is not None
        audio = apply_patches(b"".join(data), result.header_patches)
        found = tuple(chunks), result, tuple(words), tuple(segments)
        return SynthesizedSpeech(audio, started, *found)

    def open_session(
        self, request: SpeechRequest, times: SessionTimes | None = None
    ) -> StreamingSession:
        """A session whose text arrives over time. Raises as `stream` does before Started."""
        plan = self._plan(request)
        return StreamingSession(
            self._speech(request, plan),
            self._text_options(request, plan.voice),
            self._started(plan),
            times or SessionTimes(),
        )

    def _speech(self, request: SpeechRequest, plan: SpeechPlan) -> SpeechStream:
        speech = SpeechStream(self._client, self._prompts, self.codec, plan)
        if request.chunking.is_given:
            for warning in validate_streaming(plan.streaming, self.codec):
                speech.warn(warning)
        return speech

    def _started(self, plan: SpeechPlan) -> Started:
        return Started(plan.request_id, self.settings.model, plan.audio_format, plan.seed)

    def _text_options(self, request: SpeechRequest, voice: Voice) -> TextOptions:
        return replace(
            self.settings.traits.text_options(request.normalization, voice),
            mode=request.segment_mode,
            pronunciations=request.pronunciations,
        )

    def _plan(self, request: SpeechRequest) -> SpeechPlan:
        settings, sampling = self.settings, request.sampling
        if request.lora and request.lora not in settings.adapters:
            raise AdapterNotFoundError(request.lora, settings.adapters)
        return SpeechPlan(
            request_id=request.request_id or uuid4().hex,
            voice=request.voice or self.voices.default,
            audio_format=self._audio_format(self.encoding_of(request), request.sample_rate),
            shape=AudioShape(
                speaking_rate=request.speaking_rate,
                gain_db=request.gain_db,
                trim_silence=request.trim_silence,
                steady_loudness=settings.traits.steady_loudness,
            ),
            streaming=self._streaming(request.chunking),
            sampling=sampling.over(settings.sampling),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            min_tokens=sampling.min_tokens or 0,
            max_tokens=sampling.max_tokens,
            max_audio_s=min(request.max_audio_s or math.inf, settings.max_audio_s),
            max_segment_codes=settings.traits.max_codes,
            min_segment_codes=settings.traits.min_codes,
            invents_voices=settings.traits.invents_voices,
            max_seq_len=settings.max_seq_len,
            priority=request.priority,
            lora=request.lora,
            carry=request.carry,
            token_offset=request.token_offset,
            times_segments=request.timestamps is TimestampGranularity.SEGMENT,
            aligner=self._aligner(request),
        )

    def _aligner(self, request: SpeechRequest) -> Aligner | None:
        """Read when the first request asks for words."""
        if request.timestamps is not TimestampGranularity.WORD:
            return None
        if self.settings.aligner is None:
            raise PreconditionError(
                Precondition.WORD_TIMESTAMPS, "this model knows no word timings; ask for segments"
            )
        if self._loaded_aligner is None:
            self._loaded_aligner = Aligner.load(self.settings.aligner)
        return self._loaded_aligner

    def encoding_of(self, request: SpeechRequest) -> AudioEncoding:
        """What is sent for a request."""
        return request.encoding or self.settings.raw_encoding

    def _audio_format(self, encoding: AudioEncoding, sample_rate: int) -> AudioFormat:
        if encoding not in supported_encodings():
            raise NotAvailableError(f"this server cannot write {encoding.value}")
        rate = sample_rate or nearest_rate(encoding, self.codec.sample_rate)
        audio_format = AudioFormat(encoding, rate)
        try:
            check_output_format(audio_format)
        except AudioFormatError as error:
            raise InvalidRequestError.of("config.audio_format", str(error)) from error
        return audio_format

    def _streaming(self, chunking: ChunkingOverrides) -> StreamingOptions:
        options = chunking.over(self.settings.streaming)
        try:
            validate_streaming(options, self.codec)
        except DecoderConfigError as error:
            raise InvalidRequestError.of("config.chunking", str(error)) from error
        return options


def _segments(text: str, stream: SegmentStream) -> Iterator[TextSegment]:
    """Segments of a whole text, made as they are asked for, so that long text costs no wait."""
    for start in range(0, len(text), FEED_CHARACTERS):
        yield from stream.feed(text[start : start + FEED_CHARACTERS])
    yield from stream.flush()
