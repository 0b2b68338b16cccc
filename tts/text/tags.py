"""Tags such as <laugh>: words of a text that stand for sounds and bypass normalisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import Pattern

from tts.text.normalize import AlignedText, speak_words


def speak_around(text: AlignedText, tags: Sequence[str], language: str = "") -> AlignedText:
    """Apply `speak_words` between tags; tags stay unchanged, with single spaces."""
    return joined_texts(_parts(text, _pattern(tuple(tags)), language))


@lru_cache(maxsize=8)
def _pattern(tags: tuple[str, ...]) -> Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def _parts(text: AlignedText, pattern: Pattern[str], language: str) -> Iterable[AlignedText]:
    done = 0
    for match in pattern.finditer(text.text):
        yield speak_words(text.cut(done, match.start()), language)
        yield text.cut(*match.span())
        done = match.end()
    yield speak_words(text.cut(done, len(text.text)), language)


def joined_texts(parts: Iterable[AlignedText]) -> AlignedText:
    """Join parts with spaces, whose origin is the word before."""
    result = AlignedText("", ())
    for part in parts:
        if result.text and part.text:
            result = AlignedText(result.text + " ", (*result.origins, result.origins[-1]))
        result = AlignedText(result.text + part.text, result.origins + part.origins)
    return result
