"""Speech synthesis: splits a `SpeechRequest` into language-model calls and yields audio chunks.

    text → segments ─▶ SynthesisRun.speak, one after the other ─▶ Started, AudioChunk…, Done

Streaming and unary requests give the same chunks; a session does the same for text that arrives
over time.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, islice
from uuid import uuid4

from decoder import (
    AudioFormat,
    AudioFormatError,
    CodecSpec,
    DecoderConfigError,
    apply_patches,
    check_output_format,
    nearest_rate,
    supported_encodings,
    validate_streaming,
)
from tts.engine.client import EngineClient
from tts.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    NotAvailableError,
    Precondition,
    PreconditionError,
)
from tts.families.prompt import PromptBuilder
from tts.speech.aligner import Aligner
from tts.speech.cloning import CloningLimits, VoiceCloner
from tts.speech.run import SpeechPlan, SynthesisRun, SynthesisSettings
from tts.speech.session import SessionTimes, StreamingSession
from tts.speech.types import (
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
from tts.text.segmenter import SegmentStream, TextOptions
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice

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
    "SynthesizedSpeech",
    "Synthesizer",
    "TimestampGranularity",
    "UtteranceCancelled",
]


class Synthesizer:
    """Synthesizer on an engine client. One event loop; any number of requests at once."""

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
        """Return limits that leave context for the longest text and speech of one call."""
        settings = self.settings
        limits = settings.cloning
        if settings.max_seq_len is None or limits.max_prompt_tokens is not None:
            return limits
        traits = settings.traits
        text_tokens = traits.max_characters * traits.tokens_per_character + 1
        room = settings.max_seq_len - text_tokens - traits.max_codes
        return replace(limits, max_prompt_tokens=max(room, 0))

    async def stream(self, request: SpeechRequest) -> AsyncGenerator[SpeechEvent, None]:
        """Yield Started, then audio as it is generated, then Done. Closing the iterator cancels it.

        Raises InvalidRequestError, PreconditionError or NotAvailableError before Started, and
        SynthesisError when the engine fails later.
        """
        if not request.text.strip():
            raise InvalidRequestError.of("input.text", "is empty")
        voice = await self.cloner.ready(request.voice or self.voices.default)
        speech = SynthesisRun(self._client, self._prompts, self.codec, self._plan(request, voice))
        text = SegmentStream(self._text_options(request, voice, "input.text"))
        segments = text.split(request.text)
        first = [*islice(segments, 1)]  # raises for text that cannot be spoken
        yield speech.started
        for segment in chain(first, segments):
            if speech.is_exhausted:
                break
            async with aclosing(speech.speak(segment)) as chunks:
                async for chunk in chunks:
                    yield chunk
        async for chunk in speech.finish():
            yield chunk
        if not speech.num_segments:
            speech.warn("the text holds nothing that can be spoken")
        speech.warn_of_lost(text.num_lost)
        yield Done(speech.result(len(request.text)))

    async def synthesize(self, request: SpeechRequest) -> SynthesizedSpeech:
        """Return the whole synthesis; its samples equal those of `stream` for the same seed."""
        started: Started | None = None
        data: list[bytes] = []
        chunks: list[AudioChunk] = []
        words: list[WordTime] = []
        segments: list[SegmentTime] = []
        async with aclosing(self.stream(request)) as events:
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
        """Return a session whose text arrives over time. Raises as `stream` does before Started."""
        voice = request.voice or self.voices.default
        speech = SynthesisRun(self._client, self._prompts, self.codec, self._plan(request, voice))
        options = self._text_options(request, voice, "text")
        return StreamingSession(speech, options, times or SessionTimes())

    def _text_options(self, request: SpeechRequest, voice: Voice, field: str) -> TextOptions:
        path = f"{request.path}.pronunciations"
        phonemes = [(p, self._prompts.phonemes(ipa, path)) for p, ipa in request.phonemes]
        options = self.settings.traits.text_options(
            request.normalization,
            voice,
            mode=request.segment_mode,
            pronunciations=request.pronunciations,
            phonemes=tuple(phonemes),
            field=field,
        )
        if request.pronunciations or phonemes:
            options.check_pronunciations(path)
        return options

    def _plan(self, request: SpeechRequest, voice: Voice) -> SpeechPlan:
        settings, sampling = self.settings, request.sampling
        if request.lora and request.lora not in settings.adapters:
            raise AdapterNotFoundError(request.lora, settings.adapters)
        streaming, warnings = settings.streaming, []
        if request.chunking is not None:
            streaming = request.chunking.over(streaming)
            try:
                warnings = validate_streaming(streaming, self.codec)
            except DecoderConfigError as error:
                raise InvalidRequestError.of(f"{request.path}.chunking", str(error)) from error
        return SpeechPlan(
            request=request,
            settings=settings,
            request_id=request.request_id or uuid4().hex,
            voice=voice,
            audio_format=self._audio_format(request),
            streaming=streaming,
            sampling=sampling.over(settings.sampling),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_audio_s=min(request.max_audio_s or math.inf, settings.max_audio_s),
            aligner=self._aligner() if request.timestamps is TimestampGranularity.WORD else None,
            warnings=tuple(warnings),
        )

    def _aligner(self) -> Aligner:
        """Return the word aligner, which is loaded by the first request for word times."""
        if self.settings.aligner is None:
            raise PreconditionError(
                Precondition.WORD_TIMESTAMPS, "this model has no word timings; request segments"
            )
        if self._loaded_aligner is None:
            self._loaded_aligner = Aligner.load(self.settings.aligner)
        return self._loaded_aligner

    def _audio_format(self, request: SpeechRequest) -> AudioFormat:
        encoding = request.encoding or self.settings.raw_encoding
        if encoding not in supported_encodings():
            raise NotAvailableError(f"this server cannot encode {encoding.value}")
        rate = request.sample_rate or nearest_rate(encoding, self.codec.sample_rate)
        audio_format = AudioFormat(encoding, rate)
        try:
            check_output_format(audio_format)
        except AudioFormatError as error:
            raise InvalidRequestError.of(f"{request.path}.audio_format", str(error)) from error
        return audio_format
