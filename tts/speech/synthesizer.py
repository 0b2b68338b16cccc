"""Speech synthesis: splits a `SpeechRequest` into language-model calls and yields audio chunks.

    text → segments ─▶ SynthesisRun.speak, one after the other ─▶ Started, AudioChunk…, Done

Streaming and unary requests give the same chunks; a session does the same for text that arrives
over time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, islice

from decoder import (
    CodecSpec,
    apply_patches,
)
from tts.engine.client import EngineClient
from tts.errors import (
    InvalidRequestError,
    Precondition,
    PreconditionError,
)
from tts.families.prompt import PromptBuilder
from tts.speech.aligner import Aligner
from tts.speech.cloning import CloningLimits, VoiceCloner
from tts.speech.run import SynthesisRun, SynthesisSettings
from tts.speech.script import ScriptWriter, Step
from tts.speech.session import SessionTimes, StreamingSession
from tts.speech.types import (
    AudioChunk,
    Done,
    SegmentTime,
    SpeechEvent,
    SpeechRequest,
    Started,
    SynthesizedSpeech,
    TimestampGranularity,
    WordTime,
    WordTimes,
)
from tts.text.markup.passages import PassageText
from tts.text.segmenter import SegmentStream, TextOptions
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice


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
        speech = self._run(request, voice)
        text: SegmentStream | ScriptWriter
        if request.markup is None:
            text = SegmentStream(self._text_options(request, voice, "input.text"))
            steps: Iterator[Step] = text.split(request.text)
        else:
            text = self._script(request, voice)
            steps = iter(await text.write())
            speech.warn(*text.warnings)
        first = [*islice(steps, 1)]  # raises for text that cannot be spoken
        yield speech.started
        for step in chain(first, steps):
            if speech.is_exhausted:
                break
            async with aclosing(speech.perform(step)) as chunks:
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
        speech = self._run(request, voice)
        options = replace(self._text_options(request, voice, "text"), eager=request.eager)
        return StreamingSession(speech, options, times or SessionTimes())

    def _script(self, request: SpeechRequest, voice: Voice) -> ScriptWriter:
        """Return the writer of a document's script."""
        assert request.markup is not None
        field = request.markup.field

        def options(voice: Voice, text: PassageText) -> TextOptions:
            found = self._text_options(request, voice, field)
            return replace(found, phonemes=found.phonemes + text.phonemes)

        phonemes = self._prompts.phonemes
        return ScriptWriter(request, voice, self.voices, self.cloner, phonemes, options)

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

    def _run(self, request: SpeechRequest, voice: Voice) -> SynthesisRun:
        aligner = self._aligner() if request.timestamps is TimestampGranularity.WORD else None
        return SynthesisRun(self._client, self._prompts, self.settings, request, voice, aligner)

    def _aligner(self) -> Aligner:
        """Return the word aligner, which is loaded by the first request for word times."""
        if self.settings.aligner is None:
            raise PreconditionError(
                Precondition.WORD_TIMESTAMPS, "this model has no word timings; request segments"
            )
        if self._loaded_aligner is None:
            self._loaded_aligner = Aligner.load(self.settings.aligner)
        return self._loaded_aligner
