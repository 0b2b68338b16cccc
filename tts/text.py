"""Text in, segments to speak out: cleaned, read as words, cut into sentences or clauses.

    fragments → words → sentences → spoken words → segments of at most `max_characters`

Works incrementally with steady memory. Where the text is cut depends on the text (and on flushes)
only, never on how it arrived. What has nothing to speak (emoji, lone punctuation) gives no segment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from operator import itemgetter
from re import Match

from tts.errors import InvalidRequestError
from tts.text_clean import TextError, check_text, clean_word
from tts.text_normalize import AlignedText
from tts.text_pieces import is_wide, pieces_of, spoken_size
from tts.text_sentences import (
    MIN_CLAUSE_CHARACTERS,
    ends_clause,
    ends_sentence,
    is_safe_break,
    starts_item,
)
from tts.text_tags import speak_around

__all__ = [
    "SegmentMode",
    "SegmentStream",
    "SpokenWord",
    "TextError",
    "TextNormalization",
    "TextOptions",
    "TextSegment",
    "check_text",
    "split_text",
    "spoken_text",
]

MAX_WORD_CHARACTERS = 128  # longer runs without white space are cut, so that memory stays steady
MAX_PENDING_SEGMENTS = 8  # in NONE mode: raw text may shrink when it is read, but not that much
FEED_CHARACTERS = 1024
_RUNS = re.compile(r"\s+|[^\s。！？｡]*[。！？｡]|[^\s。！？｡]+")
_SPACES = re.compile(r"\s+")


class TextNormalization(Enum):
    """Whether figures and abbreviations are read as words."""

    ON = "on"
    OFF = "off"  # only Unicode is cleaned


class SegmentMode(Enum):
    """What one segment is."""

    NONE = "none"  # all text up to a flush
    SENTENCE = "sentence"
    CLAUSE = "clause"  # lowest latency for streamed text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How text is read and cut.

    `max_characters` counts letters of an alphabet; a Chinese, Japanese or Korean character takes
    about as long to say as three of them, and counts as such.
    `pronunciations` are (phrase, respelling) pairs, matched as whole words in any case.
    `ascii_only` takes accents off, for models that know no other letters; `tags` are kept as
    they are, for models that know them.
    """

    max_characters: int = 200
    mode: SegmentMode = SegmentMode.SENTENCE
    normalization: TextNormalization = TextNormalization.ON
    pronunciations: tuple[tuple[str, str], ...] = ()
    ascii_only: bool = True
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_characters < 1:
            raise ValueError("max_characters must be ≥ 1")
        for phrase, respelling in self.pronunciations:
            check_text(phrase + respelling)
            if not self.clean(phrase):
                raise InvalidRequestError.of("pronunciations", "a phrase holds no letters")

    def clean(self, text: str) -> str:
        """A phrase cleaned word by word."""
        return " ".join(filter(None, (self.clean_word(word)[0] for word in text.split())))

    def clean_word(self, word: str) -> tuple[str, int]:
        """A word cleaned, and how many letters it lost."""
        keep_signs = self.normalization is TextNormalization.ON
        return clean_word(word, ascii_only=self.ascii_only, keep_signs=keep_signs)


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word of the input, code points [start, end), and what is spoken for it."""

    text: str
    start: int
    end: int
    spoken: str


@dataclass(frozen=True, slots=True)
class TextSegment:
    """What one language-model call speaks: `text`, from code points [start, end) of the input.

    The ranges of successive segments join without gap or overlap.
    """

    index: int
    text: str
    start: int
    end: int
    words: tuple[SpokenWord, ...] = ()


@dataclass(frozen=True, slots=True)
class _Word:
    text: str  # cleaned, never empty
    start: int
    end: int
    lines_before: int  # line ends between the word before and this one


class _WordReader:
    """Fragments to cleaned words."""

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._run = ""
        self._lines = 0
        self.position = 0  # code points read
        self.num_lost = 0  # letters that cleaning could not keep

    def feed(self, fragment: str) -> Iterator[_Word]:
        check_text(fragment, self.position)
        for match in _RUNS.finditer(fragment):
            run = match.group()
            if run.isspace():
                yield from self.finish()
                self.position += len(run)
                self._lines += sum(run.count(c) for c in "\n\x85\u2028\u2029\f")
            else:
                yield from self._extend(run)

    def _extend(self, run: str) -> Iterator[_Word]:
        whole = self._run + run
        self.position += len(run)
        start, done = self.position - len(whole), 0
        while len(whole) - done > MAX_WORD_CHARACTERS:
            yield from self._word(whole[done : done + MAX_WORD_CHARACTERS], start + done)
            done += MAX_WORD_CHARACTERS
        self._run = whole[done:]
        if run[-1] in "。！？｡":
            yield from self.finish()

    def finish(self) -> Iterator[_Word]:
        """The word that nothing has ended yet."""
        run, self._run = self._run, ""
        if run:
            yield from self._word(run, self.position - len(run))

    def drop(self) -> None:
        self._run = ""

    def _word(self, run: str, start: int) -> Iterator[_Word]:
        text, lost = self._options.clean_word(run)
        self.num_lost += lost
        if text:
            lines, self._lines = self._lines, 0
            yield _Word(text, start, start + len(run), lines)


class SegmentStream:
    """Text as it comes to segments as soon as they are certain.

    stream = SegmentStream(options)
    ready = stream.feed("Hello there. How a")   # "Hello there."
    ready = stream.flush()                      # "How a"
    """

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._reader = _WordReader(options)
        self._respell = _Respelling(options)
        self._pending: list[_Word] = []
        self._num_pending = 0  # characters, as `spoken_size` counts them
        self._spoken_to = 0
        self._num_segments = 0

    def __repr__(self) -> str:
        return (
            f"SegmentStream(characters={self.num_characters}, pending={self._num_pending}, "
            f"segments={self._num_segments})"
        )

    @property
    def num_characters(self) -> int:
        """Code points fed so far."""
        return self._reader.position

    @property
    def num_lost(self) -> int:
        """Letters of scripts that the model cannot read, left out so far."""
        return self._reader.num_lost

    def feed(self, fragment: str) -> list[TextSegment]:
        """Take more text. Raises `TextError` on control characters, or text that cannot fit."""
        return [s for word in self._reader.feed(fragment) for s in self._take(word)]

    def flush(self) -> list[TextSegment]:
        """Everything that is left, whether or not it looks complete. The stream goes on."""
        segments = [s for word in self._reader.finish() for s in self._take(word)]
        return segments + self._emit(len(self._pending))

    def discard(self) -> None:
        """Forget the text that has not become a segment."""
        self._reader.drop()
        self._pending, self._num_pending = [], 0
        self._spoken_to = self.num_characters

    def _take(self, word: _Word) -> list[TextSegment]:
        segments = []
        if self._pending and self._ends_before(word):
            segments += self._emit(len(self._pending))
        self._pending.append(word)
        self._num_pending += spoken_size(word.text) + 1
        if self._ends(None):
            segments += self._emit(len(self._pending))
        elif self._is_overfull():
            segments += self._emit(self._best_break())
        return segments

    def _ends_before(self, word: _Word) -> bool:
        if self._options.mode is SegmentMode.NONE:
            return False
        is_item = word.lines_before == 1 and starts_item(word.text)
        return word.lines_before > 1 or is_item or bool(self._ends(word.text))

    def _ends(self, following: str | None) -> bool | None:
        """Whether a segment ends behind the last pending word; None when that is not known yet."""
        mode = self._options.mode
        if mode is SegmentMode.NONE:
            return False
        last = self._pending[-1].text
        previous = self._pending[-2].text if len(self._pending) > 1 else ""
        verdict = ends_sentence(previous, last, following)
        if verdict is not False or mode is SegmentMode.SENTENCE:
            return verdict
        return self._num_pending > MIN_CLAUSE_CHARACTERS and ends_clause(last, following)

    def _is_overfull(self) -> bool:
        limit = self._options.max_characters
        if self._options.mode is not SegmentMode.NONE:
            return self._num_pending > 2 * limit
        if self._num_pending > MAX_PENDING_SEGMENTS * limit:
            raise _does_not_fit(limit)
        return False

    def _best_break(self) -> int:
        """How many pending words to speak when no end is in sight."""
        limit = self._options.max_characters
        words, size, fitting, safe, clause = self._pending, 0, 1, 0, 0
        for count, word in enumerate(words[:-1], start=1):
            size += spoken_size(word.text) + 1
            if size > limit:
                break
            following = words[count].text
            fitting = count
            safe = count if is_safe_break(word.text, following) else safe
            is_late = 2 * size > limit
            clause = count if is_late and ends_clause(word.text, following) else clause
        return clause or safe or fitting

    def _emit(self, count: int) -> list[TextSegment]:
        words, self._pending = self._pending[:count], self._pending[count:]
        self._num_pending = sum(spoken_size(word.text) + 1 for word in self._pending)
        spoken = self._speak(words)
        limit = self._options.max_characters
        if self._options.mode is SegmentMode.NONE and spoken_size(spoken.text) > limit:
            raise _does_not_fit(limit)
        pieces = [p for p in pieces_of(spoken, limit) if any(map(str.isalnum, p.text))]
        stops = [*(piece.origins[0] for piece in pieces[1:]), len(words)]  # words of earlier pieces
        return [
            self._segment(
                piece.text,
                words[stop - 1].end if stop else 0,
                _spoken_words(piece, words, max(stop, piece.origins[-1] + 1)),
            )
            for piece, stop in zip(pieces, stops, strict=False)
        ]

    def _speak(self, words: Sequence[_Word]) -> AlignedText:
        joined = {i for i, pair in enumerate(pairwise(words), start=1) if _goes_on(*pair)}
        text = self._respell(AlignedText.of_words((word.text for word in words), joined))
        if self._options.normalization is TextNormalization.ON:
            return speak_around(text, self._options.tags)
        return text.sub(_SPACES, lambda match: " ")

    def _segment(self, text: str, end: int, words: tuple[SpokenWord, ...]) -> TextSegment:
        start, self._spoken_to = self._spoken_to, max(self._spoken_to, end)
        self._num_segments += 1
        return TextSegment(self._num_segments - 1, text, start, self._spoken_to, words)


def _goes_on(before: _Word, word: _Word) -> bool:
    """Whether a run in a script without spaces was cut between the two, within a sentence."""
    last, first = before.text[-1], word.text[0]
    return before.end == word.start and last not in ".?!" and (is_wide(last) or is_wide(first))


def _spoken_words(piece: AlignedText, words: Sequence[_Word], stop: int) -> tuple[SpokenWord, ...]:
    """The input's words in a piece, which ends before word `stop`.

    A phrase that is read as one belongs to its first word, which then reaches as far as it does.
    """
    pairs = zip(piece.origins, piece.text, strict=True)
    runs = [(origin, "".join(c for _, c in run)) for origin, run in groupby(pairs, itemgetter(0))]
    nexts = [*(origin for origin, _ in runs[1:]), stop]
    spoken = []
    for (origin, text), following in zip(runs, nexts, strict=True):
        last = max(origin, following - 1)
        if any(map(str.isalnum, text)):
            word = words[origin]
            spoken.append(SpokenWord(word.text, word.start, words[last].end, text.strip()))
    return tuple(spoken)


class _Respelling:
    """Replaces phrases by how they are to be read, all in one pass."""

    def __init__(self, options: TextOptions) -> None:
        pairs = ((options.clean(p), options.clean(r)) for p, r in options.pronunciations)
        self._table = {phrase.casefold(): respelling for phrase, respelling in pairs}
        longest_first = sorted(self._table, key=len, reverse=True)
        choices = "|".join(re.escape(phrase) for phrase in longest_first)
        self._pattern = re.compile(rf"(?<!\w)(?:{choices})(?!\w)", re.I) if choices else None

    def __call__(self, text: AlignedText) -> AlignedText:
        return text if self._pattern is None else text.sub(self._pattern, self._replace)

    def _replace(self, match: Match[str]) -> str:
        return self._table[match.group().casefold()]


def split_text(text: str, options: TextOptions) -> Iterator[TextSegment]:
    """Segments of a whole text, made as they are asked for.

    Raises `TextError` at once, before the first segment, when the text holds control characters.
    """
    check_text(text)
    return _split(text, SegmentStream(options))


def spoken_text(text: str, options: TextOptions) -> str:
    """All segments of a text in one. Raises `TextError` as `split_text` does."""
    spoken = ""
    for segment in split_text(text, options):
        is_new = not spoken or text[segment.start].isspace()
        goes_on = not is_new and (is_wide(spoken[-1]) or is_wide(segment.text[0]))
        spoken += segment.text if goes_on or not spoken else f" {segment.text}"
    return spoken


def _split(text: str, stream: SegmentStream) -> Iterator[TextSegment]:
    for start in range(0, len(text), FEED_CHARACTERS):
        yield from stream.feed(text[start : start + FEED_CHARACTERS])
    yield from stream.flush()


def _does_not_fit(limit: int) -> TextError:
    return TextError(f"does not fit into one segment of {limit} characters; let it be split")
