"""A book: a text that is read in pieces, and the chapters that they belong to.

plain text ──▶ blocks ─┐   paragraphs, headings, breaks
Markdown ────▶ blocks ─┴─▶ Book ── Chapter ── Piece: one request, and the silence after it
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tts.text.sentences import ends_clause, ends_sentence

PIECE_CHARACTERS = 500  # longer paragraphs are cut at the ends of sentences
PARAGRAPH_S = 0.4  # silence between paragraphs, in addition to the voice's own
BREAK_S = 1.2  # silence at a break inside a chapter, and at its end
TITLE_CHARACTERS = 120

PARAGRAPH, PART, CHAPTER, CAPITALS = range(4)
"""Levels of blocks: no heading, and headings that begin a chapter, from the highest."""

_UNITS = "one|two|three|four|five|six|seven|eight|nine"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_TEENS = "ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
_NUMBER = rf"(?i:\d{{1,4}}|[ivxlcdm]{{1,9}}|(?:{_TENS})(?:[- ](?:{_UNITS}))?|{_TEENS}|{_UNITS})"
_NUMBERED = re.compile(
    rf"(?P<kind>(?i:part|book|volume|chapter)) {_NUMBER}"
    r"(?:[.:]?|(?: ?[.:–—-]+ ?\S.*)|(?: [A-Z].*[^.?!,;]))"
)
_NAMED = re.compile(
    r"(?i:prologue|epilogue|preface|foreword|introduction|afterword|interlude|conclusion|"
    r"acknowledge?ments|appendix(?: [a-z0-9])?)[.:]?"
)
_CAPITALS = re.compile(r"[^\W_](?:[^\W_]|[ '’,:–—&-])*[^\W_]")
_NO_TITLES = ("THE END", "FINIS")
HEADING_CHARACTERS = 80
WIDE_STOPS = "。！？"
_WORDS, _SPACES = re.compile(r"\S+"), re.compile(r"\s+")
CAPITAL_LETTERS = 4  # fewer are a word, as "NO" or "USA"


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph or heading at code points [start, end) of a text, without a sound a break."""

    start: int
    end: int
    level: int = PARAGRAPH


@dataclass(frozen=True, slots=True)
class Piece:
    """Code points [start, end) of the book's text, and the exact silence after them."""

    start: int
    end: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter's title and pieces, at least one."""

    title: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Book:
    """A text as it is read, and its chapters; none if nothing can be spoken."""

    text: str
    chapters: tuple[Chapter, ...]
    has_text: bool  # besides headings

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in order."""
        return tuple(chain.from_iterable(chapter.pieces for chapter in self.chapters))


def book_of(text: str, blocks: Sequence[Block], name: str) -> Book:
    """Return the book of a text; `name` is the title of what comes before the first heading."""
    chapters = tuple(_chapters(text, blocks, name))
    has_text = any(block.level == PARAGRAPH and _is_spoken(text, block) for block in blocks)
    return Book(text, chapters, has_text)


def plain_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs of a plain text, which blank lines separate.

    A paragraph of one line may be a heading, see `heading_level`.
    """
    start, end, num_lines, position = 0, 0, 0, 0
    for line in chain(text.splitlines(keepends=True), ("",)):
        content = line.strip()
        if content:
            start = start if num_lines else position + line.index(content)
            end = position + line.index(content) + len(content)
            num_lines += 1
        elif num_lines:
            level = heading_level(text[start:end]) if num_lines == 1 else PARAGRAPH
            yield Block(start, end, level)
            num_lines = 0
        position += len(line)


def heading_level(line: str) -> int:
    """Return the level of a line that stands alone; PARAGRAPH if it is no heading."""
    line = " ".join(line.split())
    if len(line) > HEADING_CHARACTERS:
        return PARAGRAPH
    if numbered := _NUMBERED.fullmatch(line):
        return CHAPTER if numbered["kind"].lower() == "chapter" else PART
    if _NAMED.fullmatch(line):
        return CHAPTER
    num_letters = sum(map(str.isalpha, line))
    is_title = line.isupper() and num_letters >= CAPITAL_LETTERS and line not in _NO_TITLES
    return CAPITALS if is_title and _CAPITALS.fullmatch(line) else PARAGRAPH


def _chapters(text: str, blocks: Iterable[Block], name: str) -> Iterator[Chapter]:
    """Yield chapters. A heading directly after a higher one belongs to the same chapter."""
    title, level, found = "", PARAGRAPH, list[Block]()
    for block in blocks:
        is_heading = block.level != PARAGRAPH
        is_subtitle = PARAGRAPH < level < block.level
        if is_heading and not is_subtitle:
            yield from _chapter(text, title or name, found)
            title, found = "", []
        if is_heading:
            heading = " ".join(text[block.start : block.end].split()).rstrip(".:")
            title = f"{title} - {heading}" if title else heading
        level = block.level if is_heading or not _is_spoken(text, block) else PARAGRAPH
        found.append(block)
    yield from _chapter(text, title or name, found)


def _chapter(text: str, title: str, blocks: list[Block]) -> Iterator[Chapter]:
    pieces: list[Piece] = []
    for block in blocks:
        spans = [Block(*span) for span in _spans(text, block)]
        spoken = [span for span in spans if _is_spoken(text, span)]
        pieces += (Piece(span.start, span.end, 0.0) for span in spoken)
        if pieces:
            pause_s = PARAGRAPH_S if spoken else BREAK_S
            pieces[-1] = replace(pieces[-1], pause_s=pause_s)
    if pieces:
        pieces[-1] = replace(pieces[-1], pause_s=BREAK_S)
        yield Chapter(title[:TITLE_CHARACTERS].strip(), tuple(pieces))


def _is_spoken(text: str, block: Block) -> bool:
    """Whether a block holds a letter or a figure; a line of stars is a break."""
    return any(map(str.isalnum, text[block.start : block.end]))


def _spans(text: str, block: Block) -> Iterator[tuple[int, int]]:
    """Yield the spans of a block's pieces."""
    start = block.start
    while block.end - start > PIECE_CHARACTERS:
        window = text[start : start + PIECE_CHARACTERS]
        cut = start + _cut(window)
        yield start, cut
        space = _SPACES.match(text, cut)
        start = cut if space is None else space.end()
    yield start, block.end


def _cut(text: str) -> int:
    """Return where to cut a text that continues: after its last sentence, clause, word, or all."""
    words = [*_WORDS.finditer(text)]
    if not text[-1].isspace():
        words.pop()  # it may continue
    said = [word.group() for word in words]
    for n in reversed(range(1, len(words))):
        if ends_sentence(said[n - 1], said[n], said[n + 1] if n + 1 < len(said) else None):
            return words[n].end()
    if wide := max(text.rfind(mark) for mark in WIDE_STOPS) + 1:
        return wide
    for n in reversed(range(len(words) - 1)):
        if ends_clause(said[n], said[n + 1]):
            return words[n].end()
    return words[-1].end() if words else len(text)
