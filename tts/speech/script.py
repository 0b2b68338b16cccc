"""Script of a document: segments of its text, and the turns and pauses between them.

Document → passages → Turn, TextSegment…, Pause, Turn, TextSegment…
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from decoder import MAX_SPEAKING_RATE, MIN_SPEAKING_RATE
from tts.errors import (
    InvalidRequestError,
    NotAvailableError,
    NotFoundError,
    PreconditionError,
)
from tts.speech.cloning import VoiceCloner
from tts.speech.types import GAIN_DB, SpeechRequest
from tts.text.markup.document import (
    MAX_WARNINGS,
    Break,
    Mark,
    Part,
    Spoken,
    Style,
    place,
)
from tts.text.markup.passages import Passage, PassageText, passages_of
from tts.text.segmenter import SegmentStream, TextOptions, TextSegment
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice


@dataclass(frozen=True, slots=True)
class Turn:
    """Voice, rate and gain of the segments that follow."""

    voice: Voice
    speaking_rate: float
    gain_db: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence for [start, end) of the input."""

    seconds: float
    start: int
    end: int


Step = TextSegment | Turn | Pause


class ScriptWriter:
    """Writer of one request's script. What is not available is an error, or skipped if lenient."""

    def __init__(
        self,
        request: SpeechRequest,
        voice: Voice,
        voices: VoiceRegistry,
        cloner: VoiceCloner,
        check_phonemes: Callable[[str, str], str],
        options: Callable[[Voice, PassageText], TextOptions],
    ) -> None:
        """`voice`: that of text without one; `options`: how a passage is read in a voice."""
        assert request.markup is not None
        self._request, self._document, self._voice = request, request.markup, voice
        self._voices, self._cloner = voices, cloner
        self._check_phonemes, self._options = check_phonemes, options
        self._num_segments = 0
        self.num_lost = 0  # letters that the model cannot read
        self.warnings = list(self._document.warnings)

    async def write(self) -> list[Step]:
        """Return the steps.

        Raises InvalidRequestError, NotAvailableError, PreconditionError and VoiceNotFoundError.
        """
        steps: list[Step] = []
        parts = tuple(map(self._available, self._document.parts))
        for found in passages_of(replace(self._document, parts=parts)):
            if isinstance(found, Break):
                steps.append(Pause(found.seconds, found.start, found.end))
                continue
            turn = await self._turn(found)
            steps.append(turn)
            for segment in self._segments(found, turn.voice):
                steps.append(segment)
                await asyncio.sleep(0)  # let other streams run
            if steps[-1] is turn:  # white space or punctuation
                steps.pop()
        return steps

    def _available(self, part: Part) -> Part:
        """Return a part without what is not available."""
        if isinstance(part, Mark):
            self._warn(part.start, "marks are not reported")
        if not isinstance(part, Spoken):
            return part
        if part.style.emphasis:
            self._warn(part.start, "emphasis has no effect")
        if part.style.pitch:
            error = NotAvailableError(self._at(part.start, "the pitch cannot be changed"))
            self._skip(part.start, error)
        if not part.ipa:
            return part
        try:
            return replace(part, ipa=self._check_phonemes(part.ipa, self._document.field))
        except (InvalidRequestError, PreconditionError) as error:
            self._skip(part.start, error)
            return replace(part, ipa="")

    async def _turn(self, passage: Passage) -> Turn:
        style, request = passage.style, self._request
        voice = await self._voice_of(style, passage.pieces[0].start)
        low, high = GAIN_DB
        rate = request.speaking_rate * style.rate
        return Turn(
            voice=voice,
            speaking_rate=min(max(rate, MIN_SPEAKING_RATE), MAX_SPEAKING_RATE),
            gain_db=min(max(request.gain_db + style.gain_db, low), high),
        )

    async def _voice_of(self, style: Style, start: int) -> Voice:
        if not style.voice and not style.voice_language:
            return self._voice
        try:
            field = self._document.field
            voice = self._voices.choose(style.voice, style.voice_language, field, field)
            return await self._cloner.ready(voice)
        except (InvalidRequestError, NotFoundError, PreconditionError) as error:
            self._skip(start, error)
            return self._voice

    def _segments(self, passage: Passage, voice: Voice) -> Iterator[TextSegment]:
        for piece in passage.pieces:
            language = piece.style.language
            if language and voice.language_codes and not voice.speaks(language):
                self._warn(piece.start, f"voice '{voice.name}' does not speak {language}")
        text = PassageText(passage)
        options = self._options(voice, text)
        if text.phonemes:
            options.check_pronunciations(self._document.field)
        stream = SegmentStream(options)
        for segment in stream.split(text.text):
            yield replace(text.located(segment), index=self._num_segments)
            self._num_segments += 1
        self.num_lost += stream.num_lost

    def _skip(self, start: int, error: Exception) -> None:
        """Raise an error, or add a warning if the document is lenient."""
        if not self._document.lenient:
            raise error
        self._warn(start, f"{error}: skipped")

    def _warn(self, start: int, problem: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(self._at(start, problem))

    def _at(self, start: int, problem: str) -> str:
        return f"{place(self._document.source, start)}: {problem}"
