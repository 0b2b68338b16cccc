"""Speech synthesis: splits a `SpeechRequest` into language-model calls and yields audio chunks.

    text → segments ─▶ SynthesisRun.speak, one after the other ─▶ Started, AudioChunk…, Done

Streaming and unary requests give the same chunks; a session does the same for text that arrives
over time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from decoder import (
    CodecSpec,
    apply_patches,
)
from tts.engine.client import EngineClient, Slot, Speak
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
    MarkTime,
    SegmentTime,
    SpeechEvent,
    SpeechRequest,
    SpokenEvent,
    Started,
    SynthesizedSpeech,
    TimestampGranularity,
    WordTime,
    WordTimes,
)
from tts.text.clean import check_text
from tts.text.lexicon.entries import Lexicon, Pronunciation, keys_of
from tts.text.lexicon.watched import WatchedLexicons
from tts.text.markup.passages import PassageText
from tts.text.segmenter import SegmentStream, TextOptions
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice

Perform = Callable[[Any], AsyncGenerator[SpokenEvent | MarkTime, None]]
"""Performs one step of a request, which is a segment unless the request has markup."""


MAX_INSTRUCTIONS = 2000  # characters


class Synthesizer:
    """Synthesizer on an engine client. One event loop; any number of requests at once."""

    def __init__(
        self,
        client: EngineClient,
        prompts: PromptBuilder,
        voices: VoiceRegistry,
        settings: SynthesisSettings | None = None,
        lexicons: WatchedLexicons | None = None,
    ) -> None:
        """`lexicons`: pronunciations of all texts, in addition to those of requests and voices."""
        if client.codec is None:
            raise PreconditionError(Precondition.SPEECH, "this model writes text only")
        self.codec: CodecSpec = client.codec
        self.voices = voices
        self.settings = settings or SynthesisSettings()
        self._client, self._prompts = client, prompts
        self.cloner = VoiceCloner(
            client, prompts, self._cloning_limits(), self.settings.traits.text_options()
        )
        self._loaded_aligner: Aligner | None = None
        self._lexicons = lexicons
        self._lexicon_of = lru_cache(maxsize=64)(self.read_pronunciations)

    @property
    def model(self) -> str:
        """Name of the model for clients."""
        return self.settings.model

    @property
    def times_words(self) -> bool:
        """Whether it can tell when each word is spoken."""
        return self.settings.aligner is not None

    @property
    def takes_instructions(self) -> bool:
        """Whether the model reads how a text is to be spoken, in words."""
        return self.settings.traits.takes_instructions

    def check_instructions(self, instructions: str, field: str) -> None:
        """Raise PreconditionError if the model takes none, InvalidRequestError for too long ones.

        `field` is their path in the request.
        """
        if instructions and not self.takes_instructions:
            text = f"this model takes no instructions; leave {field} out"
            raise PreconditionError(Precondition.INSTRUCTIONS, text)
        if len(instructions) > MAX_INSTRUCTIONS:
            raise InvalidRequestError.of(field, f"may have {MAX_INSTRUCTIONS} characters")

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters for requests."""
        return self.settings.adapters

    def _cloning_limits(self) -> CloningLimits:
        """Return limits that leave context for the longest text and speech of one call."""
        settings = self.settings
        limits = settings.cloning
        if settings.max_seq_len is None or limits.max_prompt_tokens is not None:
            return limits
        traits = settings.traits
        text_tokens = traits.max_characters * traits.tokens_per_character + 1
        vocabulary = self._prompts.vocabulary
        per_token = vocabulary.codes_per_token if vocabulary else 1
        room = settings.max_seq_len - text_tokens - traits.max_codes // per_token
        return replace(limits, max_prompt_tokens=max(room, 0))

    async def stream(
        self, request: SpeechRequest, slot: Slot | None = None
    ) -> AsyncGenerator[SpeechEvent, None]:
        """Yield Started, then audio as it is generated, then Done. Closing the iterator cancels it.

        The model is used behind the call's `slot`; what `Slot.held` raises is raised before
        Started. The text is read before, and sent to an engine that admits the call itself.

        Raises InvalidRequestError, PreconditionError or NotAvailableError before Started, and
        SynthesisError when the engine fails later.
        """
        if not request.text.strip():
            raise InvalidRequestError.of("input.text", "is empty")
        voice = request.voice or self.voices.default
        if slot is not None and (voice.clip is not None or request.markup is not None):
            await slot.held()  # voices are made with the model
        if voice.clip is not None:
            voice = await self.cloner.ready(voice)
        speak = None if slot is None else slot.speak_behind(self._client)
        speech = self._run(request, voice, speak)
        perform: Perform = speech.speak
        text: SegmentStream | ScriptWriter
        if request.markup is None:
            text = SegmentStream(self._text_options(request, voice, "input.text"))
            steps: Iterator[Step] = text.split(request.text)
        else:
            perform, text = speech.perform, self._script(request, voice)
            steps = iter(await text.write())
            speech.warn(*text.warnings)
        first = [*islice(steps, 1)]  # raises for text that cannot be spoken
        if slot is not None and speak is None:
            await slot.held()
        async with _begun(_spoken(speech, perform, chain(first, steps))) as events:
            if slot is not None:
                await slot.held()
            yield speech.started
            async for event in events:
                yield event
        if not speech.num_segments:
            speech.warn("the text holds nothing that can be spoken")
        speech.warn_of_lost(text.num_lost)
        yield Done(speech.result(len(request.text)))

    async def synthesize(self, request: SpeechRequest) -> SynthesizedSpeech:
        """Return the whole synthesis: the samples of `stream` for the same seed and `check`.

        A request that says nothing about the check of segments is checked here if the model has an
        aligner, and not in `stream`: holding a segment back delays no whole audio.
        """
        if request.check is None:
            request = replace(request, check=self.settings.aligner is not None)
        started: Started | None = None
        data: list[bytes] = []
        chunks: list[AudioChunk] = []
        words: list[WordTime] = []
        segments: list[SegmentTime] = []
        marks: list[MarkTime] = []
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
                    case MarkTime():
                        marks.append(event)
                    case Done(result):
                        break
        assert started is not None
        audio = apply_patches(b"".join(data), result.header_patches)
        found = tuple(chunks), result, tuple(words), tuple(segments), tuple(marks)
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
        known: dict[tuple[tuple[str, ...], str, tuple[Pronunciation, ...]], TextOptions] = {}

        def options(voice: Voice, text: PassageText) -> TextOptions:
            # Not looked up for each passage: a hash of all pronunciations takes a millisecond.
            key = voice.language_codes, voice.language, voice.pronunciations
            if key not in known:
                known[key] = self._text_options(request, voice, field)
            found = known[key]
            languages = () if found.ascii_only else text.languages(found.language)
            return replace(found, phonemes=found.phonemes + text.phonemes, languages=languages)

        return ScriptWriter(
            replace(request, voice=voice),
            self.voices,
            self.cloner,
            self.codec,
            self._prompts.pronounced,
            options,
            has_word_times=self.settings.aligner is not None,
        )

    def _text_options(self, request: SpeechRequest, voice: Voice, field: str) -> TextOptions:
        """Return how a request's text is read in a voice.

        Raises InvalidRequestError for pronunciations that the model cannot read.
        """
        has_lexicons = request.pronunciations or voice.pronunciations or self._lexicons is not None
        return self.settings.traits.text_options(
            request.normalization,
            voice,
            mode=request.segment_mode,
            lexicons=tuple(self._lexicons_of(request, voice)) if has_lexicons else (),
            field=field,
        )

    def _lexicons_of(self, request: SpeechRequest, voice: Voice) -> Iterator[Lexicon]:
        """Yield the pronunciations of a request, of its voice, and of the server."""
        if request.pronunciations:
            field = f"{request.path}.pronunciations"
            yield self._lexicon_of(request.pronunciations, field, any_case=True)
        if voice.pronunciations:
            yield self._lexicon_of(voice.pronunciations, f"{request.path}.voice.pronunciations")
        if self._lexicons is not None:
            yield from (found for found in self._lexicons.current() if _is_for(found, voice))

    @property
    def num_broken_lexicons(self) -> int:
        """Number of the server's lexicon files that could not be read when they changed."""
        return 0 if self._lexicons is None else self._lexicons.num_broken

    def read_pronunciations(
        self, entries: tuple[Pronunciation, ...], field: str, *, any_case: bool = False
    ) -> Lexicon:
        """Return pronunciations as the model reads them.

        Raises InvalidRequestError, which names an entry below `field`, for one that it cannot read.
        """
        ascii_only, read = self.settings.traits.ascii_only, []
        for index, entry in enumerate(entries):
            phrase, spoken = (f"{field}[{index}].{name}" for name in ("phrase", "pronunciation"))
            check_text(entry.phrase, field=phrase)
            check_text(entry.spoken, field=spoken)
            wrong = phrase
            try:
                keys_of(entry.phrase, ascii_only=ascii_only)
                wrong = spoken
                read.append(self._prompts.pronounced(entry))
            except ValueError as error:
                raise InvalidRequestError.of(wrong, str(error)) from error
        return Lexicon.of(read, ascii_only=ascii_only, any_case=any_case)

    def _run(
        self, request: SpeechRequest, voice: Voice, speak: Speak | None = None
    ) -> SynthesisRun:
        if voice is not request.voice:
            request = replace(request, voice=voice)
        if request.timestamps is TimestampGranularity.WORD:
            self._aligner()  # raises before Started
        aligner = None if self.settings.aligner is None else self._aligner
        return SynthesisRun(self._client, self._prompts, self.settings, request, aligner, speak)

    def _aligner(self) -> Aligner:
        """Return the word aligner, which is loaded by the first request that needs it."""
        if self.settings.aligner is None:
            raise PreconditionError(
                Precondition.WORD_TIMESTAMPS, "this model has no word timings; request segments"
            )
        if self._loaded_aligner is None:
            self._loaded_aligner = Aligner.load(self.settings.aligner)
        return self._loaded_aligner


async def _spoken(
    speech: SynthesisRun, perform: Perform, steps: Iterable[Step]
) -> AsyncGenerator[SpokenEvent | MarkTime, None]:
    """Yield the events of all steps, and those at the end."""
    for step in steps:
        if speech.is_exhausted:
            break
        async with aclosing(perform(step)) as events:
            async for event in events:
                yield event
    async for chunk in speech.finish():
        yield chunk
    for mark in speech.last_marks():
        yield mark


@asynccontextmanager
async def _begun(
    events: AsyncGenerator[SpokenEvent | MarkTime, None],
) -> AsyncIterator[AsyncGenerator[SpokenEvent | MarkTime, None]]:
    """Run a generator up to its first event at once, while its reader does something else.

    Until it is read, what it raises is kept.
    """

    async def begin() -> SpokenEvent | MarkTime | None:
        return await anext(events, None)

    async def read() -> AsyncGenerator[SpokenEvent | MarkTime, None]:
        event = await first
        while event is not None:
            yield event
            event = await anext(events, None)

    first = asyncio.create_task(begin())
    try:
        await asyncio.sleep(0)  # it begins before the body, which may write to a client
        async with aclosing(read()) as found:
            yield found
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()


def _is_for(lexicon: Lexicon, voice: Voice) -> bool:
    """Return whether a lexicon is of a voice's language; en-US and en-GB count as one."""
    language = lexicon.language.partition("-")[0]
    return not language or not voice.language_codes or voice.speaks(language)
