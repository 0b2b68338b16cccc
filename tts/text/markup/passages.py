"""Passages of a `Document`: texts without a break inside, in one style, with their positions."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from tts.text.markup.document import Border, Break, Document, Spoken, Style
from tts.text.segmenter import FIRST_PLACE, PLACES, SpokenWord, TextSegment, phrase_of_place

BORDER = "\n\n"  # the segmenter ends a sentence here
_REPLACEMENT = "\ufffd"  # instead of letters that would stand for phonemes


@dataclass(frozen=True, slots=True)
class Passage:
    """Adjacent pieces of one style."""

    style: Style
    pieces: tuple[Spoken, ...]


def passages_of(document: Document) -> Iterator[Passage | Break]:
    """Yield the passages and the breaks of a document, in order."""
    pieces: list[Spoken] = []
    for part in document.parts:
        match part:
            case Spoken():
                is_space = part.text.isspace()
                if pieces and not is_space and _is_turn(pieces[0].style, part.style):
                    yield Passage(pieces[0].style, tuple(pieces))
                    pieces = []
                pieces.append(part)
            case Border(start) if pieces:
                pieces.append(Spoken(BORDER, start, start, pieces[-1].style))
            case Break(seconds) if seconds:
                if pieces:
                    yield Passage(pieces[0].style, tuple(pieces))
                    pieces = []
                yield part
    if pieces:
        yield Passage(pieces[0].style, tuple(pieces))


def _is_turn(before: Style, after: Style) -> bool:
    """Return whether a text in `after` is spoken by itself, not within one in `before`."""
    return (
        replace(after, language=before.language, pitch=before.pitch, emphasis=before.emphasis)
        != before
    )


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
