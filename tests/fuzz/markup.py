"""Random SSML and tags: read or refused, with segments whose positions are in the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from xml.sax.saxutils import escape, quoteattr

from tests.fuzz.base import Case, InvariantError, Target
from tests.fuzz.texts import some_text
from tts.errors import InvalidRequestError
from tts.text.markup.document import MAX_BREAK_S, Break, Document, Mark
from tts.text.markup.passages import PassageText, passages_of
from tts.text.markup.say_as import DATE_FORMATS, KINDS
from tts.text.markup.ssml import ATTRIBUTES, read_ssml
from tts.text.markup.tags import read_tags
from tts.text.segmenter import SegmentStream, TextOptions

VALUES = (
    *("", "1", "-1", "50%", "+10%", "0.5", "1e9", "slow", "loud", "+6dB", "none", "strong", "high"),
    *("250ms", "1.5s", "99999s", "slt", "en-US", "ipa", "təˈmɑːtoʊ", "a b", "12/31/2026", "\u0130"),
    *(*KINDS, *DATE_FORMATS, "yyyymmdd", "hms12"),
)
TEXTS = (
    *("12", "1,024.5", "3/4", "1+1/2", "9/11", "2:30pm", "1'21\"", "$4.20", "+1 (800) 555-01"),
    *("2026-12-31", "31.12.2026", "20261231", "10km", "²", "٣", "1" * 70, "Hello.", "\U00013000"),
)
TAGS = ("[pause:1s]", "[pause:99s]", "[voice:slt]", "[voice:]", "[a](/b/)", "[", "](/", "/)", "]")


def _element(chance: Random, depth: int = 0) -> str:
    """Return an element with random attributes and content, mostly well-formed."""
    name = chance.choice((*ATTRIBUTES, "x:y"))
    known = (*sorted(ATTRIBUTES.get(name, ())), "xml:lang", "z")
    names = chance.sample(known, min(len(known), chance.choice((0, 1, 1, 2, 3))))
    attributes = "".join(f" {n}={quoteattr(chance.choice(VALUES))}" for n in names)
    inside = "".join(_content(chance, depth + 1) for _ in range(chance.randrange(4)))
    return f"<{name}{attributes}>{inside}</{name}>"


def _content(chance: Random, depth: int) -> str:
    if depth < 6 and chance.random() < 0.5:
        return _element(chance, depth)
    if chance.random() < 0.5:
        return escape(chance.choice(TEXTS))
    if chance.random() < 0.1:
        return chance.choice(
            ("&amp;", "&#65;", "&#x9b;", "&no;", "<![CDATA[<&]]>", "<!--c-->", "\r\n")
        )
    return escape(some_text(chance)[:80])


def _try_one(chance: Random) -> None:
    inside = "".join(_content(chance, 1) for _ in range(chance.randrange(6)))
    source = f"<speak>{inside}</speak>"
    if chance.random() < 0.2:
        cut = chance.randrange(len(source))
        source = source[:cut] + chance.choice(("", "<", "&", "\0", "'")) + source[cut + 1 :]
    tags = "".join(chance.choice((chance.choice(TAGS), some_text(chance)[:40])) for _ in range(8))
    for read, text in ((read_ssml, source), (read_tags, tags)):
        try:
            document = read(text)
        except InvalidRequestError:
            continue
        _check(document, chance)
    try:
        _check(read_ssml(source, lenient=True), chance)
    except InvalidRequestError:
        return


def _check(document: Document, chance: Random) -> None:
    ascii_only, ends_at_marks = chance.random() < 0.5, chance.random() < 0.5
    marks: list[Mark] = []
    for found in passages_of(document, ends_at_marks=ends_at_marks):
        if isinstance(found, Mark):
            marks.append(found)
            continue
        if isinstance(found, Break):
            if not 0 < found.seconds <= MAX_BREAK_S:
                raise InvariantError(f"a break of {found.seconds} s")
            continue
        marks += found.marks
        text = PassageText(found)
        options = TextOptions(phonemes=text.phonemes, ascii_only=ascii_only)
        for segment in map(text.located, SegmentStream(options).split(text.text)):
            spans = [(segment.start, segment.end), *((w.start, w.end) for w in segment.words)]
            if any(not 0 <= start <= end <= len(document.source) for start, end in spans):
                raise InvariantError("a position is not in the source")
    if marks != [part for part in document.parts if isinstance(part, Mark)]:
        raise InvariantError("marks are lost, or not in the order of the text")
    if any(not 0 <= mark.start <= mark.end <= len(document.source) for mark in marks):
        raise InvariantError("the range of a mark is not in the source")


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    yield _try_one


MARKUP = Target("markup", _opened)
