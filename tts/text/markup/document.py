"""`Document`: what SSML and tags say, in the order in which it is spoken.

    <speak>One <break time="1s"/> <prosody rate="slow">two</prosody></speak>
    → Spoken("One "), Break(1.0), Spoken(" "), Spoken("two", Style(rate=0.64))

Positions are Unicode code points into the source, tags included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from tts.text.clean import TextError

MAX_BREAK_S = 10.0
MAX_CHARACTERS = 1_000_000
MAX_PARTS = 10_000
"""Limits of a source, and of its elements or tags."""
MAX_WARNINGS = 20  # of one document; later ones are left out


@dataclass(frozen=True, slots=True)
class Style:
    """Properties of a spoken text, relative to the request that contains it."""

    voice: str = ""  # name; "": the voice of the request
    voice_language: str = ""  # BCP-47 code that chooses a voice where none is named
    language: str = ""  # BCP-47 code of the text; "": unknown
    rate: float = 1.0  # factor
    gain_db: float = 0.0
    pitch: float = 0.0  # semitones
    emphasis: str = ""  # strong, moderate, reduced; "": none


PLAIN = Style()


@dataclass(frozen=True, slots=True)
class SayAs:
    """Text of SSML's `say-as`, with its attributes `interpret-as` and `format`."""

    kind: str
    text: str
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Spoken:
    """Text that is spoken for [start, end) of the source.

    Its characters are those of the source, one by one, if it has the length of that range; else
    it replaces the whole range. `ipa`: phonemes of the text; "": it is read. `said_as`: what the
    text is the English reading of, for voices of other languages.
    """

    text: str
    start: int
    end: int
    style: Style = PLAIN
    ipa: str = ""
    said_as: SayAs | None = None

    @property
    def is_literal(self) -> bool:
        """Whether each character stands for one of the source."""
        return not self.ipa and len(self.text) == self.end - self.start


@dataclass(frozen=True, slots=True)
class Break:
    """Silence, at most `MAX_BREAK_S`."""

    seconds: float
    start: int
    end: int


class MarkKind(Enum):
    """Kind of a mark."""

    MARK = "mark"  # of a document's author
    SENTENCE = "sentence"
    TURN = "turn"  # of a dialogue


@dataclass(frozen=True, slots=True)
class Mark:
    """Place in front of a word, whose time is reported.

    [start, end) of the source is the mark's tag, or the sentence or the turn that begins.
    """

    kind: MarkKind
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Border:
    """Start or end of a sentence or a paragraph: no sentence continues across it."""

    start: int
    is_paragraph: bool = False


Part = Spoken | Break | Mark | Border


@dataclass(frozen=True, slots=True)
class Document:
    """Parts in order, and warnings about what was skipped or limited.

    `lenient`: parts that are not available are skipped with a warning, too. `field` is the
    source's field path in its request.
    """

    source: str
    parts: tuple[Part, ...]
    warnings: tuple[str, ...] = ()
    lenient: bool = False
    field: str = "input.ssml"

    @classmethod
    def of(cls, source: str, parts: Iterable[Part], **values: Any) -> Document:
        """Return a document in which adjacent pieces of one style are joined."""
        runs: list[list[Part]] = []
        for part in parts:
            if runs and _continues(runs[-1][-1], part):
                runs[-1].append(part)
            else:
                runs.append([part])
        return cls(source, tuple(map(_joined, runs)), **values)

    @property
    def text(self) -> str:
        """All text that is spoken."""
        return "".join(part.text for part in self.parts if isinstance(part, Spoken))

    @property
    def has_voices(self) -> bool:
        """Whether several voices speak."""
        styles = [p.style for p in self.parts if isinstance(p, Spoken) and not p.text.isspace()]
        return len({(style.voice, style.voice_language) for style in styles}) > 1

    @property
    def has_marks(self) -> bool:
        """Whether there are marks that may be inside of a sentence."""
        return any(isinstance(p, Mark) and p.kind is MarkKind.MARK for p in self.parts)


def _continues(last: Part, part: Part) -> bool:
    if not isinstance(last, Spoken) or not isinstance(part, Spoken):
        return False
    is_adjacent = last.end == part.start and last.style == part.style
    return is_adjacent and last.is_literal and part.is_literal


def _joined(run: list[Part]) -> Part:
    first, last = run[0], run[-1]
    if not isinstance(first, Spoken) or not isinstance(last, Spoken):
        return first
    text = "".join(part.text for part in run if isinstance(part, Spoken))
    return replace(first, text=text, end=last.end)


def place(source: str, offset: int) -> str:
    """Return a position for a message, as in "line 2, column 5"."""
    line = source.count("\n", 0, offset) + 1
    column = offset - source.rfind("\n", 0, offset)
    return f"line {line}, column {column}"


def check_size(source: str, field: str) -> None:
    """Raise `TextError` for a source of more than `MAX_CHARACTERS`."""
    if len(source) > MAX_CHARACTERS:
        raise TextError(f"has more than {MAX_CHARACTERS} characters", field)
