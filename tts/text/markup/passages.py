"""Passages of a `Document`: texts without a break inside, in one style, with their positions."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeGuard

from tts.text.markup.document import Border, Break, Document, Mark, Part, Spoken, Style
from tts.text.segmenter import FIRST_PLACE, PLACES, SpokenWord, TextSegment, phrase_of_place

BORDER = "\n\n"  # the segmenter ends a sentence here
_SPACE = re.compile(r"\s")
_REPLACEMENT = "\ufffd"  # instead of letters that would stand for phonemes


@dataclass(frozen=True, slots=True)
class Passage:
    """Adjacent pieces of one style, and the marks among them or behind the last."""

    style: Style
    pieces: tuple[Spoken, ...]
    marks: tuple[Mark, ...] = ()


def passages_of(
    document: Document, *, ends_at_marks: bool = False
) -> Iterator[Passage | Break | Mark]:
    """Yield the passages, the breaks and the marks outside of passages, in order.

    With `ends_at_marks` no passage has a mark: it ends in front of the word behind the mark.
    """
    pieces: list[Spoken] = []
    marks: list[Mark] = []
    for part in between_words(document.parts) if ends_at_marks else document.parts:
        if pieces and _ends_passage(pieces[0].style, part, ends_at_marks=ends_at_marks):
            yield Passage(pieces[0].style, tuple(pieces), tuple(marks))
            pieces, marks = [], []
        match part:
            case Spoken():
                pieces.append(part)
            case Border(start) if pieces:
                pieces.append(Spoken(BORDER, start, start, pieces[-1].style))
            case Mark() if pieces:
                marks.append(part)
            case Mark():
                yield part
            case Break(seconds) if seconds:
                yield part
    if pieces:
        yield Passage(pieces[0].style, tuple(pieces), tuple(marks))


def _ends_passage(style: Style, part: Part, *, ends_at_marks: bool) -> bool:
    match part:
        case Spoken():
            return not part.text.isspace() and _is_turn(style, part.style)
        case Mark():
            return ends_at_marks
        case Break(seconds):
            return seconds > 0
        case _:
            return False


def between_words(parts: Iterable[Part]) -> Iterator[Part]:
    """Yield the parts with each mark inside of a word behind the word."""
    held: list[Mark] = []
    word: Spoken | None = None  # has a word at its end, unless a space follows
    for part in parts:
        if isinstance(part, Mark) and word is not None:
            held.append(part)
            continue
        following = part
        if held and word is not None and _continues(part, word):
            rest, following = _cut_at_space(part)
            if rest.text:
                yield rest
            if not following.text:
                continue
        yield from held
        held = []
        yield following
        word = following if _ends_in_word(following) else None
    yield from held


def _ends_in_word(part: Part) -> TypeGuard[Spoken]:
    return isinstance(part, Spoken) and not part.text[-1:].isspace()


def _continues(part: Part, before: Spoken) -> TypeGuard[Spoken]:
    """Return whether a part may hold the rest of a word."""
    return isinstance(part, Spoken) and part.is_literal and not _is_turn(before.style, part.style)


def _cut_at_space(piece: Spoken) -> tuple[Spoken, Spoken]:
    """Return a literal piece up to its first space, and what follows."""
    space = _SPACE.search(piece.text)
    end = space.start() if space else len(piece.text)
    return (
        replace(piece, text=piece.text[:end], end=piece.start + end),
        replace(piece, text=piece.text[end:], start=piece.start + end),
    )


def _is_turn(before: Style, after: Style) -> bool:
    """Return whether a text in `after` is spoken by itself, not within one in `before`."""
    return replace(after, language=before.language, emphasis=before.emphasis) != before


class PassageText:
    """Text of a passage; phrases of `phonemes`, (phrase, IPA), replace words with phonemes."""

    def __init__(self, passage: Passage) -> None:
        self._is_pronounced = any(piece.ipa for piece in passage.pieces)
        self._pieces: list[Spoken] = []
        self._phrases: dict[tuple[str, str], str] = {}  # of a text and its phonemes
        for piece in passage.pieces:
            self._append(piece)
        self._starts = [*accumulate((len(piece.text) for piece in self._pieces), initial=0)]
        written = {phrase[1]: text for (text, _), phrase in self._phrases.items()}
        self._written = str.maketrans({chr(FIRST_PLACE): "", **written})
        self.text = "".join(piece.text for piece in self._pieces)
        self.phonemes = tuple((phrase, ipa) for (_, ipa), phrase in self._phrases.items())

    def _append(self, piece: Spoken) -> None:
        """Add a piece, or a phrase for its phonemes, which must be a word by itself."""
        text = PLACES.sub(_REPLACEMENT, piece.text) if self._is_pronounced else piece.text
        if piece.ipa:
            phrase = phrase_of_place(len(self._phrases))
            text = self._phrases.setdefault((text, piece.ipa), phrase)
        last = self._pieces[-1] if self._pieces else None
        if last is not None and (piece.ipa or last.ipa) and _touch(last.text, text):
            self._pieces.append(Spoken(" ", piece.start, piece.start, piece.style))
        self._pieces.append(replace(piece, text=text))

    def languages(self, language: str) -> tuple[tuple[int, str], ...]:
        """Return the changes of language in `text`: code points, and the language from there on.

        `language` is that of pieces without one. () if all pieces have that.
        """
        changes: list[tuple[int, str]] = []
        for start, piece in zip(self._starts, self._pieces, strict=False):
            found = piece.style.language or language
            if found != (changes[-1][1] if changes else language):
                changes.append((start, found))
        return tuple(changes)

    def located(self, segment: TextSegment) -> TextSegment:
        """Return a segment of `text` with the positions and the words of the source."""
        start, end = self._start(segment.start), self._end(segment.end)
        words = tuple(map(self._word, segment.words))
        return replace(segment, start=start, end=max(start, end), words=words)

    def _word(self, word: SpokenWord) -> SpokenWord:
        start, end = self._start(word.start), self._end(word.end)
        return replace(word, text=word.text.translate(self._written), start=start, end=end)

    def _start(self, position: int) -> int:
        """Return where the character at a position begins in the source."""
        index = min(bisect_right(self._starts, position), len(self._pieces)) - 1
        piece = self._pieces[index]
        return piece.start + (position - self._starts[index] if piece.is_literal else 0)

    def _end(self, position: int) -> int:
        """Return where the character before a position ends in the source."""
        index = max(0, bisect_left(self._starts, position) - 1)
        piece = self._pieces[index]
        return piece.start + position - self._starts[index] if piece.is_literal else piece.end


def _touch(before: str, after: str) -> bool:
    return before[-1:].isalnum() and after[:1].isalnum()
