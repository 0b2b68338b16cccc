"""Tags in brackets as a `Document`: [pause:1.5s], [tomato](/təˈmɑːtoʊ/), [voice:NAME].

All other text is plain, brackets included. A voice, or a blend of voices with "+", holds until the
next one; [voice:] is that of the request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tts.text.clean import TextError, check_text
from tts.text.markup.document import (
    MAX_BREAK_S,
    MAX_PARTS,
    MAX_WARNINGS,
    PLAIN,
    Break,
    Document,
    Part,
    Spoken,
    Style,
    check_size,
    place,
)
from tts.text.markup.values import seconds_of

_TAG = re.compile(
    r"\[pause:(?P<pause>\d{1,6}(?:\.\d{1,6})?m?s)\]"
    r"|\[voice:(?P<voice>[\w-]{0,64}|[\w.() -]{1,80}\+[\w.() +-]{1,920})\]"
    r"|\[(?P<word>[^\[\]\n]{1,200})\]\(/(?P<ipa>[^()/\[\]\n]{1,200})/\)"
)


def read_tags(source: str, *, field: str = "input.tags") -> Document:
    """Return the document of a text with tags. Raises `TextError`, which names `field`."""
    check_text(source, field=field)
    check_size(source, field)
    warnings: list[str] = []
    parts = tuple(_parts(source, field, warnings))
    return Document.of(source, parts, warnings=tuple(warnings), field=field)


def _parts(source: str, field: str, warnings: list[str]) -> Iterator[Part]:
    style, done = PLAIN, 0
    for count, tag in enumerate(_TAG.finditer(source), start=1):
        start, end = tag.span()
        if count > MAX_PARTS:
            raise TextError(f"{place(source, start)}: has more than {MAX_PARTS} tags", field)
        if start > done:
            yield Spoken(source[done:start], done, start, style)
        done = end
        match tag.lastgroup:
            case "pause":
                seconds = seconds_of(tag["pause"], None)
                if seconds > MAX_BREAK_S and len(warnings) < MAX_WARNINGS:
                    text = f"the break is shortened to {MAX_BREAK_S:g} s"
                    warnings.append(f"{place(source, start)}: {text}")
                yield Break(min(seconds, MAX_BREAK_S), start, end)
            case "voice":
                style = Style(voice=tag["voice"])
            case _:
                yield Spoken(tag["word"], start, end, style, tag["ipa"].strip())
    if done < len(source):
        yield Spoken(source[done:], done, len(source), style)
