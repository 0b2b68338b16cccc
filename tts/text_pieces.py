"""A text too long for one language-model call to pieces, cut where a speaker would pause."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import accumulate

from tts.text_normalize import AlignedText

WIDE_SIZE = 3  # letters that take as long to say as one Chinese, Japanese or Korean character
_WIDE = ("W", "F")  # East Asian Width (Unicode Standard Annex 11)


def spoken_size(text: str) -> int:
    """Characters of a text, in letters of an alphabet: what a segment's limit counts."""
    return len(text) if text.isascii() else sum(map(_size, text))


def is_wide(character: str) -> bool:
    """Whether it is a Chinese, Japanese or Korean one."""
    is_letter = character.isalnum() and not character.isascii()
    return is_letter and unicodedata.east_asian_width(character) in _WIDE


def _size(character: str) -> int:
    return WIDE_SIZE if is_wide(character) else 1


def pieces_of(text: AlignedText, limit: int) -> Iterator[AlignedText]:
    """Pieces of at most `limit` (one character at least), about equally long, cut at pauses."""
    ends = [0, *accumulate(map(_size, text.text))]  # sizes of what is before each character
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
    """The last place that is at most `size` behind `start`, and at least one character."""
    place = start + 1
    while place + 1 < len(ends) and ends[place + 1] - ends[start] <= size:
        place += 1
    return place


def _cut_near(text: str, start: int, ideal: int, most: int) -> int:
    """Where to cut, up to `most`: at a pause near `ideal`, a space, or anywhere."""
    gaps = [i for i in range(start + 1, min(most, len(text) - 1) + 1) if _is_gap(text, i)]
    late = [i for i in gaps if 2 * (i - start) > ideal - start]
    for group in (".?!", ",;:、"):
        pauses = [i for i in late if text[i - 1] in group]
        if pauses:
            return min(pauses, key=lambda i: abs(i - ideal))
    if late or gaps:
        return min(late or gaps, key=lambda i: abs(i - ideal))
    return most


def _is_gap(text: str, place: int) -> bool:
    """Whether words part before `place`: at a space, or at a mark in a script without spaces."""
    before = text[place - 2 : place - 1]
    return text[place] == " " or (text[place - 1] in ".?!,;:、" and _size(before or " ") > 1)
