"""Dialogues as a `Document`: turns of several voices, with a pause between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tts.errors import FieldViolation, InvalidRequestError
from tts.text.clean import TextError, check_text
from tts.text.markup.document import (
    MAX_BREAK_S,
    Border,
    Break,
    Document,
    Mark,
    MarkKind,
    Part,
    Spoken,
    Style,
    check_size,
)

MAX_TURNS = 1000
PAUSE_S = 0.4  # between two turns, unless a request states it
BETWEEN = "\n"  # between the texts of two turns, in the source of the document


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """Text in a voice; "": that of the request."""

    voice: str
    text: str


def voice_of_turn(index: int) -> str:
    """Return a name for the voice of a turn that is none of a model's voices."""
    return f"turn {index}"


def read_dialogue(
    turns: Sequence[DialogueTurn], pause_s: float | None = None, *, field: str = "input.dialogue"
) -> Document:
    """Return the document of a dialogue; its source joins the texts of the turns.

    Raises InvalidRequestError, which names each wrong turn below `field`.
    """
    check_number(len(turns), field)
    violations = [*_violations(turns, pause_s, field)]
    if violations:
        raise InvalidRequestError(*violations)
    source = BETWEEN.join(turn.text for turn in turns)
    check_size(source, field)
    return Document.of(source, _parts(turns, PAUSE_S if pause_s is None else pause_s), field=field)


def check_number(number: int, field: str) -> None:
    """Raise InvalidRequestError for more turns than a dialogue may have."""
    if number > MAX_TURNS:
        problem = f"has {number} turns, the limit is {MAX_TURNS}"
        raise InvalidRequestError.of(f"{field}.turns", problem)


def _violations(
    turns: Sequence[DialogueTurn], pause_s: float | None, field: str
) -> Iterator[FieldViolation]:
    if pause_s is not None and not 0 <= pause_s <= MAX_BREAK_S:
        yield FieldViolation(f"{field}.pause", f"must be in [0, {MAX_BREAK_S:g}] seconds")
    if not turns:
        yield FieldViolation(f"{field}.turns", "is empty")
    for index, turn in enumerate(turns):
        path = f"{field}.turns[{index}].text"
        if not turn.text.strip():
            yield FieldViolation(path, "is empty")
        try:
            check_text(turn.text, field=path)
        except TextError as error:
            yield from error.violations


def _parts(turns: Sequence[DialogueTurn], pause_s: float) -> Iterator[Part]:
    start = 0
    for turn in turns:
        if start:
            yield Border(start, is_paragraph=True)
            yield Break(pause_s, start - len(BETWEEN), start)
        end = start + len(turn.text)
        yield Mark(MarkKind.TURN, turn.voice, start, end)
        yield Spoken(turn.text, start, end, Style(voice=turn.voice))
        start = end + len(BETWEEN)
