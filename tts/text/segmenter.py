"""Incremental segmentation of text: cleaning, reading as words, cutting into sentences or clauses.

    fragments → words → sentences → spoken words → segments of at most `max_characters`

Memory is bounded. The cuts depend on the text and on flushes only, not on how the text arrived.
Text that is not spoken (emoji without words, lone punctuation) gives no segment.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate, groupby, pairwise
from operator import itemgetter

from tts.errors import InvalidRequestError
from tts.text.clean import TextError, check_text, clean_word, without_emoji, without_others
from tts.text.ipa import marked
from tts.text.languages.registry import find_language, is_english
from tts.text.lexicon.entries import (
    Alphabet,
    Lexicon,
    Pronunciation,
    find_phrases,
    may_continue,
)
from tts.text.normalize import AlignedText, speak_words
from tts.text.sentences import (
    MIN_CLAUSE_CHARACTERS,
    ends_clause,
    ends_sentence,
    is_phrase_break,
    is_safe_break,
    starts_item,
)
from tts.text.tags import joined_texts, speak_around

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

WIDE_SIZE = 3  # letters with the spoken length of one Chinese, Japanese or Korean character
_WIDE = ("W", "F")  # East Asian Width (Unicode Standard Annex 11)
MAX_WORD_CHARACTERS = 128  # longer runs without white space are cut, which bounds memory
MAX_PENDING_SEGMENTS = 8  # in NONE mode: normalisation shrinks text by less than this factor
FEED_CHARACTERS = 1024
EAGER_CLAUSE_WORDS, EAGER_WORDS = 3, 4  # minimum length of a sentence's eager beginning
MAX_EAGER = 2
_RUNS = re.compile(r"\s+|[^\s。！？｡]+[。！？｡]?|[。！？｡]")
_SPACES = re.compile(r"\s+")
_PAUSES = " ,;:-–—"
FIRST_STAND_IN, MAX_PHONEMES = 0x12000, 900
"""Cuneiform letters, which no normalisation changes, stand for phonemes."""
FIRST_PLACE = 0x13000
PLACES = re.compile(f"([{chr(FIRST_PLACE)}-{chr(FIRST_PLACE + MAX_PHONEMES)}])")
"""Pairs of hieroglyphs, see `phrase_of_place`, are kept where `TextOptions.phonemes` names them."""
_STAND_INS = re.compile(f"[{chr(FIRST_STAND_IN)}-{chr(FIRST_STAND_IN + MAX_PHONEMES - 1)}]")


def phrase_of_place(number: int) -> str:
    """Return a phrase that stands at one place of a text: the first hieroglyph and another one.

    One letter alone would be an initial, which ends no sentence.
    """
    return chr(FIRST_PLACE) + chr(FIRST_PLACE + 1 + number)


class TextNormalization(Enum):
    """Normalisation of figures and abbreviations."""

    ON = "on"
    OFF = "off"  # only Unicode is cleaned


class SegmentMode(Enum):
    """Unit of segmentation."""

    NONE = "none"  # all text up to a flush
    SENTENCE = "sentence"
    CLAUSE = "clause"  # lowest latency for streamed text


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of normalisation and segmentation.

    `max_characters` counts letters of an alphabet; a Chinese, Japanese or Korean character counts
    as three, about its spoken length.
    `lexicons` have pronunciations as the model reads them, those that take precedence first;
    `phonemes` are pairs of a phrase that stands at one place and its IPA (see `phrase_of_place`).
    `ascii_only` removes accents, for models that read ASCII only; for a model that reads `letters`
    besides, those that become neither these nor ASCII are removed. `tags` are kept unchanged, for
    models that know them. `field` is the text's field path in its request, which errors name.
    `eager` cuts the first sentence, and that after each flush or `discard`, as soon as possible: 1
    after a clause, 2 also after a few words. Both parts are segments.
    `language` is the BCP-47 code of the text; "" is read as English. `languages` are changes of it:
    code points of the text and the language from there on. A language without a reader keeps its
    figures and signs as they are written.
    """

    max_characters: int = 200
    mode: SegmentMode = SegmentMode.SENTENCE
    normalization: TextNormalization = TextNormalization.ON
    lexicons: tuple[Lexicon, ...] = ()
    phonemes: tuple[tuple[str, str], ...] = ()
    ascii_only: bool = True
    letters: frozenset[str] | None = None
    tags: tuple[str, ...] = ()
    field: str = "text"
    eager: int = 0
    language: str = ""
    languages: tuple[tuple[int, str], ...] = ()

    def __post_init__(self) -> None:
        if self.max_characters < 1:
            raise ValueError("max_characters must be ≥ 1")

    def check_pronunciations(self, field: str) -> None:
        """Raise InvalidRequestError, naming `field`, for too many places with phonemes."""
        if len(self.phonemes) > MAX_PHONEMES:
            raise InvalidRequestError.of(field, f"has more than {MAX_PHONEMES} phrases in IPA")

    def clean(self, text: str) -> str:
        """Return a phrase, cleaned word by word, without emoji."""
        english = is_english(self.language)
        words = (self._cleaned(word, english)[0] for word in without_emoji(text).split())
        return " ".join(filter(None, words))

    def clean_word(self, word: str, start: int) -> tuple[str, int]:
        """Return a word that begins at code point `start`, cleaned, and the number of removed
        letters.
        """
        english = is_english(self.language_at(start))
        if not self.phonemes or PLACES.search(word) is None:
            return self._cleaned(word, english)
        parts = [
            (p, 0) if PLACES.match(p) else self._cleaned(p, english) for p in PLACES.split(word)
        ]
        return "".join(text for text, _ in parts), sum(lost for _, lost in parts)

    def _cleaned(self, word: str, is_english: bool) -> tuple[str, int]:
        signs = self._keeps_signs or not is_english
        ascii_only = self.ascii_only
        text, lost = clean_word(
            word, ascii_only=ascii_only, keep_signs=signs, is_english=is_english
        )
        return (text, lost) if self.letters is None else without_others(text, self.letters)

    @property
    def _keeps_signs(self) -> bool:
        return self.normalization is TextNormalization.ON

    def language_at(self, position: int) -> str:
        """Return the language of the text at a code point."""
        if not self.languages:
            return self.language
        index = bisect_right(self.languages, position, key=itemgetter(0)) - 1
        return self.languages[index][1] if index >= 0 else self.language


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """Word of the input, at code points [start, end), with its spoken form."""

    text: str
    start: int
    end: int
    spoken: str


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Spoken text of one language-model call, from code points [start, end) of the input.

    The ranges of successive segments have no gaps and do not overlap. `pronunciations` are those of
    lexicons that were applied here, or in a later segment that was cut from the same text. An open
    segment is the beginning of a sentence. The next one continues it: its `sentence` is the spoken
    text of both, or "" if it is spoken by itself.
    """

    index: int
    text: str
    start: int
    end: int
    words: tuple[SpokenWord, ...] = ()
    pronunciations: tuple[Pronunciation, ...] = ()
    is_open: bool = False
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class _Word:
    text: str  # cleaned, never empty
    start: int
    end: int
    lines_before: int  # line ends between the previous word and this one


@dataclass(frozen=True, slots=True)
class _Opening:
    """Words of an open segment, its text, and its characters as counted for pending words."""

    words: tuple[_Word, ...]
    spoken: str
    size: int


class _WordReader:
    """Reader of cleaned words from fragments."""

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._run = ""
        self._lines = 0
        self.position = 0  # code points read
        self.num_lost = 0  # letters that cleaning removed

    def feed(self, fragment: str) -> Iterator[_Word]:
        check_text(fragment, self.position, self._options.field)
        for match in _RUNS.finditer(fragment):
            run = match.group()
            if run.isspace():
                yield from self.finish()
                self.position += len(run)
                if run != " ":
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
        """Yield the pending word, if any."""
        run, self._run = self._run, ""
        if run:
            yield from self._word(run, self.position - len(run))

    def drop(self) -> None:
        self._run = ""

    def _word(self, run: str, start: int) -> Iterator[_Word]:
        text = run
        if not run.isascii():
            text, lost = self._options.clean_word(run, start)
            self.num_lost += lost
        if text:
            lines, self._lines = self._lines, 0
            yield _Word(text, start, start + len(run), lines)


class SegmentStream:
    """Incremental segmenter: returns segments of fed text as soon as they are final.

    stream = SegmentStream(options)
    ready = stream.feed("Hello there. How a")   # "Hello there."
    ready = stream.flush()                      # "How a"
    """

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._reader = _WordReader(options)
        has_phrases = options.lexicons or options.phonemes
        self._respell = _Respelling(options) if has_phrases else None
        self._pending: list[_Word] = []
        self._num_pending = 0  # size in the unit of `spoken_size`
        self._spoken_to = 0
        self._num_segments = 0
        self._begin()

    def _begin(self) -> None:
        """Begin an utterance."""
        self._is_eager = self._options.eager > 0
        self._opening: _Opening | None = None

    def __repr__(self) -> str:
        return (
            f"SegmentStream(characters={self.num_characters}, pending={self._num_pending}, "
            f"segments={self._num_segments})"
        )

    @property
    def num_characters(self) -> int:
        """Number of code points fed so far."""
        return self._reader.position

    @property
    def num_lost(self) -> int:
        """Number of removed letters, which are of scripts that the model cannot read."""
        return self._reader.num_lost

    def feed(self, fragment: str) -> list[TextSegment]:
        """Append text and return final segments. Raises `TextError` for invalid text."""
        return [s for word in self._reader.feed(fragment) for s in self._take(word)]

    def flush(self) -> list[TextSegment]:
        """Return the segments of all remaining text, complete or not. The stream continues."""
        segments = [s for word in self._reader.finish() for s in self._take(word)]
        segments += self._emit(len(self._pending))
        self._begin()
        return segments

    def split(self, text: str) -> Iterator[TextSegment]:
        """Yield the segments of a whole text lazily: the first is spoken while others are read."""
        for start in range(0, len(text), FEED_CHARACTERS):
            for word in self._reader.feed(text[start : start + FEED_CHARACTERS]):
                yield from self._take(word)
        yield from self.flush()

    def discard(self) -> None:
        """Drop the text that is not part of a segment yet."""
        self._reader.drop()
        self._pending, self._num_pending = [], 0
        self._spoken_to = self.num_characters
        self._begin()

    def _take(self, word: _Word) -> list[TextSegment]:
        segments = []
        if self._ends_before(word):
            segments += self._emit(len(self._pending))
        elif self._is_eager and self._can_open(word):
            segments += self._emit_open()
        self._pending.append(word)
        self._num_pending += spoken_size(word.text) + 1
        if self._ends(None):
            segments += self._emit(len(self._pending))
        elif self._is_overfull():
            segments += self._emit(self._best_break())
        return segments

    def _ends_before(self, word: _Word) -> bool:
        if self._options.mode is SegmentMode.NONE or not self._pending:
            return False
        is_item = word.lines_before == 1 and starts_item(word.text)
        return word.lines_before > 1 or is_item or bool(self._ends(word.text))

    def _ends(self, following: str | None) -> bool | None:
        """Return whether a segment ends after the last pending word; None if not known yet."""
        mode = self._options.mode
        if mode is SegmentMode.NONE:
            return False
        last = self._pending[-1].text
        before = self._pending[-2:-1] or (self._opening.words[-1:] if self._opening else ())
        language = find_language(self._options.language_at(self._pending[-1].start))
        verdict = ends_sentence(before[0].text if before else "", last, following, language)
        if verdict is not False or mode is SegmentMode.SENTENCE:
            return verdict
        size = self._num_pending + (self._opening.size if self._opening else 0)
        return size > MIN_CLAUSE_CHARACTERS and ends_clause(last, following)

    def _can_open(self, following: _Word) -> bool:
        """Return whether the pending words can be spoken before the rest of their sentence."""
        words, text = self._pending, following.text
        if len(words) < EAGER_CLAUSE_WORDS or following.start == words[-1].end:
            return False
        if not any(map(str.isalnum, text)):  # a dash by itself ends the clause in front of it
            return False
        last = words[-1].text
        if not ends_clause(last, text):
            is_late = self._options.eager == MAX_EAGER and len(words) >= EAGER_WORDS
            if not (is_late and is_phrase_break(last, text)):
                return False
        return not self._continues() and self._is_read_apart(following)

    def _continues(self) -> bool:
        """Return whether a phrase of a lexicon may begin here and end behind the pending words."""
        if self._respell is None:
            return False
        return may_continue(" ".join(w.text for w in self._pending), self._respell.lexicons)

    def _is_read_apart(self, following: _Word) -> bool:
        """Return whether the pending words and the next one are read alike apart and together."""
        words = self._pending
        together, _ = self._speak([*words, following])
        parts = together.divided(len(words))
        apart = self._speak(words)[0].text, self._speak([following])[0].text
        return tuple(part.text.strip(_PAUSES) for part in parts) == tuple(
            text.strip(_PAUSES) for text in apart
        )

    def _emit_open(self) -> list[TextSegment]:
        """Return the segment of the pending words, which is open unless there are several."""
        words = tuple(self._pending)
        size = self._num_pending
        segments = self._emit(len(words))
        if len(segments) != 1:
            return segments
        self._opening = _Opening(words, segments[0].text, size)
        return [replace(segments[0], is_open=True)]

    def _is_overfull(self) -> bool:
        limit = self._options.max_characters
        if self._options.mode is not SegmentMode.NONE:
            return self._num_pending > 2 * limit
        if self._num_pending > MAX_PENDING_SEGMENTS * limit:
            raise _does_not_fit(self._options)
        return False

    def _best_break(self) -> int:
        """Return the number of pending words to emit when no sentence end has been found."""
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
        opening, self._opening = self._opening, None
        if not count:
            return []
        words, self._pending = self._pending[:count], self._pending[count:]
        self._num_pending = sum(spoken_size(word.text) + 1 for word in self._pending)
        spoken, applied = self._speak(words)
        limit = self._options.max_characters
        if self._options.mode is SegmentMode.NONE and spoken_size(spoken.text) > limit:
            raise _does_not_fit(self._options)
        sentence = ""
        if opening is not None:
            spoken, sentence = self._continued(opening, words, spoken)
        pieces = [p for p in pieces_of(spoken, limit) if any(map(str.isalnum, p.text))]
        stops = [*(piece.origins[0] for piece in pieces[1:]), len(words)]  # ends of pieces
        segments = [
            self._segment(
                piece.text,
                words[stop - 1].end if stop else 0,
                _spoken_words(piece, words, max(stop, piece.origins[-1] + 1)),
            )
            for piece, stop in zip(pieces, stops, strict=False)
        ]
        if segments:
            self._is_eager = False
            if len(segments) > 1 or spoken_size(sentence) > limit:
                sentence = ""
            if applied or sentence:
                segments[0] = replace(segments[0], pronunciations=applied, sentence=sentence)
        return segments

    def _continued(
        self, opening: _Opening, words: Sequence[_Word], spoken: AlignedText
    ) -> tuple[AlignedText, str]:
        """Return how words are read behind an opening, and the text of both.

        It is their part of the whole sentence's reading, unless that reads the opening differently:
        then the words are read by themselves, as `spoken`, and there is no text of both.
        """
        sentence, _ = self._speak([*opening.words, *words])
        first, rest = sentence.divided(len(opening.words))
        if first.text.strip(_PAUSES) != opening.spoken.strip(_PAUSES):
            return spoken, ""
        return rest, sentence.text

    def _speak(self, words: Sequence[_Word]) -> tuple[AlignedText, tuple[Pronunciation, ...]]:
        """Return words as they are spoken, and the pronunciations of lexicons that they have."""
        joined = {
            index
            for index, (before, word) in enumerate(pairwise(words), start=1)
            if before.end == word.start and _is_same_run(before.text, word.text)
        }
        text = AlignedText.of_words((word.text for word in words), joined)
        said = self._respell(text) if self._respell is not None else None
        if said is not None:
            text = said.text
        if self._options.languages:
            text = joined_texts(self._read_by_language(text, words))
        else:
            text = self._read(text, self._options.language)
        return (text, ()) if said is None else (said.spelled_out(text), said.applied)

    def _read(self, text: AlignedText, language: str) -> AlignedText:
        """Return a text of one language as it is spoken."""
        options = self._options
        has_reader = is_english(language) or find_language(language) is not None
        if options.normalization is TextNormalization.OFF or not has_reader:
            return text.sub(_SPACES, lambda match: " ")
        if options.tags:
            return speak_around(text, options.tags, language)
        return speak_words(text, language)

    def _read_by_language(self, text: AlignedText, words: Sequence[_Word]) -> Iterator[AlignedText]:
        """Yield the readings of the words of each language, which keep the pause between them."""
        starts = range(len(words))
        for language, run in groupby(
            starts, lambda index: self._options.language_at(words[index].start)
        ):
            indices = tuple(run)
            _, rest = text.divided(indices[0])
            part, _ = rest.divided(len(indices))
            read = self._read(part, language)
            pause = part.text[-1:] if part.text[-1:] in (",", ";", ":") else ""
            if pause and read.text and indices[-1] + 1 < len(words):
                read = AlignedText(read.text + pause, (*read.origins, read.origins[-1]))
            yield AlignedText(read.text, tuple(n + indices[0] for n in read.origins))

    def _segment(self, text: str, end: int, words: tuple[SpokenWord, ...]) -> TextSegment:
        start, self._spoken_to = self._spoken_to, max(self._spoken_to, end)
        self._num_segments += 1
        return TextSegment(self._num_segments - 1, text, start, self._spoken_to, words)


def _is_same_run(before: str, word: str) -> bool:
    """Return whether neighbours are one run of a script without spaces, within a sentence."""
    last, first = before[-1], word[0]
    return last not in ".?!" and (is_wide(last) or is_wide(first))


def _spoken_words(piece: AlignedText, words: Sequence[_Word], stop: int) -> tuple[SpokenWord, ...]:
    """Return the input's words in a piece, which ends before word `stop`.

    A phrase with one pronunciation belongs to its first word, which is extended to its end.
    """
    origins, count = piece.origins, len(piece.text)
    starts = [n for n in range(count) if not n or origins[n] != origins[n - 1]]
    spoken = []
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        origin, text = origins[start], piece.text[start:end]
        last = max(origin, (origins[end] if end < count else stop) - 1)
        if any(map(str.isalnum, text)):
            word = words[origin]
            spoken.append(SpokenWord(word.text, word.start, words[last].end, text.strip()))
    return tuple(spoken)


@dataclass(frozen=True, slots=True)
class _Respelled:
    """Text with letters in place of phonemes, the phonemes by letter, and what was applied."""

    text: AlignedText
    phonemes: Mapping[str, str] = field(default_factory=dict)
    applied: tuple[Pronunciation, ...] = ()

    def spelled_out(self, text: AlignedText) -> AlignedText:
        """Return the normalised text with phonemes between marks."""
        if not self.phonemes:
            return text
        return text.sub(_STAND_INS, lambda match: self.phonemes.get(match.group(), match.group()))


class _Respelling:
    """Replacement of phrases by their pronunciations, in a single pass.

    A letter that the text does not have stands for phonemes until the text is normalised: they are
    not to be read.
    """

    def __init__(self, options: TextOptions) -> None:
        places = {
            phrase: Pronunciation(phrase, ipa, Alphabet.IPA) for phrase, ipa in options.phonemes
        }
        self.lexicons = ((Lexicon(places),) if places else ()) + options.lexicons
        self._places, self._clean = places.keys(), options.clean

    def __call__(self, text: AlignedText) -> _Respelled:
        found = tuple(find_phrases(text.text, self.lexicons))
        entries = dict.fromkeys(entry for _, _, entry in found)
        if not entries:
            return _Respelled(text)
        spoken, phonemes = self._spoken(text.text, entries)
        return _Respelled(
            text.replaced((a, b, spoken[entry]) for a, b, entry in found if entry in spoken),
            phonemes,
            tuple(entry for entry in spoken if entry.phrase not in self._places),
        )

    def _spoken(
        self, text: str, entries: Iterable[Pronunciation]
    ) -> tuple[dict[Pronunciation, str], dict[str, str]]:
        """Return what stands in the text for each entry, and the phonemes of letters."""
        letters = (chr(code) for code in range(FIRST_STAND_IN, FIRST_STAND_IN + MAX_PHONEMES))
        unused = (letter for letter in letters if letter not in text)
        spoken, phonemes = {}, {}
        for entry in entries:
            if entry.alphabet is not Alphabet.IPA:
                spoken[entry] = self._clean(entry.spoken)
            elif letter := next(unused, ""):  # no text of one call has so many phrases
                spoken[entry] = letter
                phonemes[letter] = marked(entry.spoken)
        return spoken, phonemes


def split_text(text: str, options: TextOptions) -> Iterator[TextSegment]:
    """Return a lazy iterator over the segments of a whole text.

    Raises `TextError` at once, before the first segment, for text with control characters.
    """
    check_text(text, field=options.field)
    return SegmentStream(options).split(text)


def spoken_text(text: str, options: TextOptions) -> str:
    """Return the joined segments of a text. Raises `TextError` as `split_text` does."""
    spoken = ""
    for segment in split_text(text, options):
        is_new = not spoken or text[segment.start].isspace()
        goes_on = not is_new and (is_wide(spoken[-1]) or is_wide(segment.text[0]))
        spoken += segment.text if goes_on or not spoken else f" {segment.text}"
    return spoken


def _does_not_fit(options: TextOptions) -> TextError:
    limit = options.max_characters
    return TextError(
        f"does not fit into one segment of {limit} characters; use another mode", options.field
    )


def spoken_size(text: str) -> int:
    """Return the size of a text in letters of an alphabet, the unit of a segment's limit."""
    return len(text) if text.isascii() else sum(map(_size, text))


def is_wide(character: str) -> bool:
    """Return whether a character is Chinese, Japanese or Korean."""
    is_letter = character.isalnum() and not character.isascii()
    return is_letter and unicodedata.east_asian_width(character) in _WIDE


def _size(character: str) -> int:
    return WIDE_SIZE if is_wide(character) else 1


def pieces_of(text: AlignedText, limit: int) -> Iterator[AlignedText]:
    """Iterate over pieces of at most `limit`, but at least one character, cut at pauses."""
    if spoken_size(text.text) <= limit:
        if text.text:
            yield text.cut(0, len(text.text))
        return
    ends = [0, *accumulate(map(_size, text.text))]  # size of the text before each character
    start, last = 0, len(text.text)
    while ends[last] - ends[start] > limit:
        rest = ends[last] - ends[start]
        ideal = -(-rest // -(-rest // limit))
        most = _reach(ends, start, limit)
        cut = _cut_near(text.text, start, _reach(ends, start, ideal), most)
        yield text.cut(start, cut)
        start = cut
    if start < last:
        yield text.cut(start, last)


def _reach(ends: list[int], start: int, size: int) -> int:
    """Return the last position within `size` after `start`, at least one character after it."""
    position = start + 1
    while position + 1 < len(ends) and ends[position + 1] - ends[start] <= size:
        position += 1
    return position


def _cut_near(text: str, start: int, ideal: int, most: int) -> int:
    """Return where to cut, up to `most`: at a pause near `ideal`, a space, or anywhere."""
    gaps = [i for i in range(start + 1, min(most, len(text) - 1) + 1) if _is_gap(text, i)]
    late = [i for i in gaps if 2 * (i - start) > ideal - start]
    for group in (".?!", ",;:、"):
        pauses = [i for i in late if text[i - 1] in group]
        if pauses:
            return min(pauses, key=lambda i: abs(i - ideal))
    if late or gaps:
        return min(late or gaps, key=lambda i: abs(i - ideal))
    return most


def _is_gap(text: str, position: int) -> bool:
    """Return whether to cut at `position`: before a space, or after a wide mark."""
    before = text[position - 2 : position - 1]
    return text[position] == " " or (text[position - 1] in ".?!,;:、" and _size(before or " ") > 1)
