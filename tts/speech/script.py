"""Script of a document: segments of its text, and the turns, pauses and marks between them.

Document → passages → Turn, TextSegment…, Pause, Mark, Turn, TextSegment…
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from decoder import MAX_SPEAKING_RATE, MIN_SPEAKING_RATE, CodecSpec
from tts.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from tts.speech.cloning import VoiceCloner
from tts.speech.types import GAIN_DB, PITCH, SpeechRequest
from tts.text.lexicon.entries import Alphabet, Pronunciation
from tts.text.markup.document import (
    MAX_WARNINGS,
    Break,
    Mark,
    MarkKind,
    Part,
    Spoken,
    Style,
    place,
)
from tts.text.markup.passages import Passage, PassageText, passages_of
from tts.text.markup.say_as import say_as_in
from tts.text.segmenter import SegmentStream, TextOptions, TextSegment
from tts.voices.registry import VoiceRegistry
from tts.voices.types import Voice


@dataclass(frozen=True, slots=True)
class Turn:
    """Voice, rate, gain and pitch of the segments that follow."""

    voice: Voice
    speaking_rate: float
    gain_db: float
    pitch: float  # semitones


@dataclass(frozen=True, slots=True)
class Pause:
    """Silence for [start, end) of the input."""

    seconds: float
    start: int
    end: int


Step = TextSegment | Turn | Pause | Mark
"""A mark stands in front of the segment with the word behind it, or of the pause, or at the end."""


class ScriptWriter:
    """Writer of one request's script. What is not available is an error, or skipped if lenient."""

    def __init__(
        self,
        request: SpeechRequest,
        voices: VoiceRegistry,
        cloner: VoiceCloner,
        codec: CodecSpec,
        pronounced: Callable[[Pronunciation], Pronunciation],
        options: Callable[[Voice, PassageText], TextOptions],
        *,
        has_word_times: bool,
    ) -> None:
        """The request's voice is that of text without one.

        `pronounced` returns a pronunciation as the model reads it; `options`: how a passage is read
        in a voice.

        Without `has_word_times` a segment begins with each word behind a mark.
        """
        assert request.markup is not None
        assert request.voice is not None
        self._request, self._document, self._voice = request, request.markup, request.voice
        self._voices, self._cloner, self._codec = voices, cloner, codec
        self._pronounced, self._options = pronounced, options
        self._has_word_times = has_word_times
        self._cast = dict(request.cast)
        self._num_segments = 0
        self.num_lost = 0  # letters that the model cannot read
        self.warnings = list(self._document.warnings)

    async def write(self) -> list[Step]:
        """Return the steps.

        Raises InvalidRequestError, PreconditionError and VoiceNotFoundError.
        """
        steps: list[Step] = []
        parts = tuple(map(self._available, self._document.parts))
        document = replace(self._document, parts=parts)
        for found in passages_of(document, ends_at_marks=not self._has_word_times):
            match found:
                case Break(seconds, start, end):
                    steps.append(Pause(seconds, start, end))
                case Mark():
                    steps.append(found)
                case Passage():
                    steps += await self._steps(found)
        return steps

    async def _steps(self, passage: Passage) -> list[Step]:
        """Return the steps of a passage: marks alone if it is white space or punctuation."""
        turn, marks = await self._turn(passage), deque(passage.marks)
        passage = self._said(passage, turn.voice)
        steps: list[Step] = []
        for segment in self._segments(passage, turn.voice):
            if not steps:
                steps.append(turn)
            while marks and marks[0].start <= segment.words[-1].start:
                steps.append(marks.popleft())
            steps.append(segment)
            await asyncio.sleep(0)  # let other streams run
        return [*steps, *marks]

    def _said(self, passage: Passage, voice: Voice) -> Passage:
        """Return a passage whose `say-as` is read in the language of its text."""
        if all(piece.said_as is None for piece in passage.pieces):
            return passage
        options = self._options(voice, PassageText(passage))
        pieces = list(passage.pieces)
        for index, piece in enumerate(pieces):
            own = "" if options.ascii_only else piece.style.language
            if piece.said_as and (
                text := say_as_in(
                    own or options.language,
                    piece.said_as.kind,
                    piece.said_as.text,
                    piece.said_as.layout,
                )
            ):
                pieces[index] = replace(piece, text=text)
        return replace(passage, pieces=tuple(pieces))

    def _as_asked(self, voice: Voice) -> Voice:
        """Return a voice with the request's language and instructions where it has none."""
        asked = self._voice
        if asked.instructions and not voice.instructions:
            voice = replace(voice, instructions=asked.instructions)
        if voice.language or voice.language_codes:
            return voice
        return replace(voice, language=asked.language)

    def _available(self, part: Part) -> Part:
        """Return a part without what is not available; the mark of a turn gets its voice's name."""
        if isinstance(part, Mark) and part.kind is MarkKind.TURN:
            return replace(part, name=self._request.cast.get(part.name, self._voice).name)
        if not isinstance(part, Spoken):
            return part
        if part.style.emphasis and not self._has_word_times:
            self._warn(part.start, "emphasis has no effect: this model has no word times")
        if part.style.pitch and not self._codec.can_shift_pitch:
            self._skip(part.start, without_pitch(self._codec))
            part = replace(part, style=replace(part.style, pitch=0.0))
        return self._spoken(part) if part.ipa else part

    def _spoken(self, part: Spoken) -> Spoken:
        """Return a part with the phonemes that it has, or with letters for a model without IPA."""
        try:
            said = self._pronounced(Pronunciation(part.text, part.ipa, Alphabet.IPA))
        except ValueError as error:
            self._skip(part.start, str(error))
            return replace(part, ipa="")
        if said.alphabet is Alphabet.IPA:
            return replace(part, ipa=said.spoken)
        self._warn(part.start, f"this model reads letters, the phonemes are spoken: {said.spoken}")
        return replace(part, text=said.spoken, ipa="")

    async def _turn(self, passage: Passage) -> Turn:
        style, request = passage.style, self._request
        voice = await self._voice_of(style, passage.pieces[0].start)
        rate = request.speaking_rate * style.rate
        return Turn(
            voice=voice,
            speaking_rate=_within((MIN_SPEAKING_RATE, MAX_SPEAKING_RATE), rate),
            gain_db=_within(GAIN_DB, request.gain_db + style.gain_db),
            pitch=_within(PITCH, request.pitch + style.pitch),
        )

    async def _voice_of(self, style: Style, start: int) -> Voice:
        if not style.voice and not style.voice_language:
            return self._voice
        if style.voice in self._cast:
            return self._as_asked(await self._ready(style.voice))
        try:
            field = self._document.field
            voice = self._voices.choose(style.voice, style.voice_language, field, field)
            return self._as_asked(await self._cloner.ready(voice))
        except (InvalidRequestError, NotFoundError, PreconditionError) as error:
            self._skip(start, str(error), error)
            return self._voice

    async def _ready(self, name: str) -> Voice:
        """Return a voice of the cast; its recording is encoded once, for all of its turns."""
        given = self._cast[name]
        if given.clip is not None and given.prompt is None:
            voice = await self._cloner.ready(given)
            self._cast |= {
                known: replace(other, prompt=voice.prompt, clip=None)
                for known, other in self._cast.items()
                if other.clip is given.clip
            }
        return self._cast[name]

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

    def _skip(self, start: int, problem: str, error: Exception | None = None) -> None:
        """Raise an error, InvalidRequestError by default, or warn if the document is lenient."""
        if not self._document.lenient:
            raise error or InvalidRequestError.of(self._document.field, self._at(start, problem))
        self._warn(start, f"{problem}: skipped")

    def _warn(self, start: int, problem: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(self._at(start, problem))

    def _at(self, start: int, problem: str) -> str:
        return f"{place(self._document.source, start)}: {problem}"


def without_pitch(codec: CodecSpec) -> str:
    """Return the message for a pitch that a codec cannot give."""
    return f"the pitch cannot be changed: this model's codec is '{codec.name}'"


def _within(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])
