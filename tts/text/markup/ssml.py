"""SSML 1.1 as a `Document`. Entities, DTDs and addresses are never read.

https://www.w3.org/TR/speech-synthesis11/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar
from xml.parsers import expat

from tts.text.clean import TextError, check_text
from tts.text.markup.document import (
    MAX_BREAK_S,
    MAX_PARTS,
    MAX_WARNINGS,
    PLAIN,
    Border,
    Break,
    Document,
    Mark,
    MarkKind,
    Part,
    SayAs,
    Spoken,
    Style,
    check_size,
    place,
)
from tts.text.markup.say_as import say_as
from tts.text.markup.values import gain_of, pitch_of, rate_of, seconds_of

T = TypeVar("T")

MAX_DEPTH = 64
MAX_NAME_CHARACTERS = 40  # of names in messages
EMPHASES = ("strong", "moderate", "reduced", "none")
ATTRIBUTES: Mapping[str, frozenset[str]] = {
    name: frozenset(attributes.split())
    for name, attributes in {
        "speak": "version onlangfailure",
        "p": "onlangfailure",
        "s": "onlangfailure",
        "w": "role onlangfailure",
        "token": "role onlangfailure",
        "break": "time strength",
        "prosody": "rate volume pitch contour range duration",
        "say-as": "interpret-as format detail language",
        "sub": "alias",
        "phoneme": "alphabet ph type",
        "voice": "name language languages gender age variant required ordering onvoicefailure",
        "lang": "onlangfailure",
        "mark": "name",
        "emphasis": "level",
        "meta": "name http-equiv content",
        "metadata": "",
        "audio": "src fetchtimeout fetchhint maxage maxstale clipBegin clipEnd repeatCount "
        "repeatDur soundLevel speed",
        "desc": "",
    }.items()
}
"""Elements with their attributes; those with a prefix, such as xml:lang, are allowed everywhere."""
WITHOUT_EFFECT = ("gender", "age", "variant")  # of `voice`
UNAVAILABLE = ("contour", "range", "duration")  # of `prosody`
BORDERS = {"p": True, "s": False}
REPLACING = ("say-as", "sub", "phoneme")
SILENT = ("metadata", "meta", "desc")
_TAG = re.compile(r"""<(?:[^>"']|"[^"]*"|'[^']*')*>""")  # a value may have a ">"
_SPACES = str.maketrans(dict.fromkeys("\n\r\x85\u2028\u2029\f\v", " "))


def read_ssml(source: str, *, lenient: bool = False, field: str = "input.ssml") -> Document:
    """Return the document of an SSML source, whose root is `<speak>`.

    Raises `TextError`, which names `field` and the line and column, for what is no SSML or is not
    available. With `lenient` unknown elements and attributes are skipped with a warning, and the
    text inside is spoken.
    """
    check_text(source, field=field)
    check_size(source, field)
    return _Reader(source, lenient=lenient, field=field).document()


@dataclass(frozen=True, slots=True)
class _Element:
    """Open element; `attributes` and `start` are those of its tag.

    `index`: that of the element's mark among the parts, if it is a sentence.
    """

    name: str
    style: Style
    start: int
    attributes: Mapping[str, str]
    is_silent: bool
    index: int = -1


class _Reader:
    """Handlers of one parse."""

    def __init__(self, source: str, *, lenient: bool, field: str) -> None:
        self._source, self._data = source, source.encode()
        self._lenient, self._field = lenient, field
        self._known = 0, 0  # a position in bytes, and the same in characters
        self._open: list[_Element] = []
        self._num_elements = 0
        self._parts: list[Part] = []
        self._replaced: list[str] | None = None  # text inside an element of REPLACING
        self._warnings: list[str] = []
        self._parser = parser = expat.ParserCreate("UTF-8")  # whatever the declaration says
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = self._refuse_doctype
        self._handlers: Mapping[str, Callable[[_Element], Style | None]] = {
            "break": self._break,
            "prosody": self._prosody,
            "voice": self._voice,
            "mark": self._mark,
            "emphasis": self._emphasis,
            "audio": self._audio,
            "phoneme": self._phoneme,
        }

    def document(self) -> Document:
        try:
            self._parser.Parse(self._data, True)
        except expat.ExpatError as error:
            where = f"line {error.lineno}, column {error.offset + 1}"
            problem = expat.ErrorString(error.code)
            raise TextError(f"{where}: {problem}", self._field) from error
        return Document.of(
            self._source,
            self._parts,
            warnings=tuple(self._warnings),
            lenient=self._lenient,
            field=self._field,
        )

    # --- positions and errors

    def _position(self) -> int:
        """Return the position of the current event in characters."""
        (num_bytes, num_characters), now = self._known, self._parser.CurrentByteIndex
        num_characters += len(self._data[num_bytes:now].decode())
        self._known = now, num_characters
        return num_characters

    def _error(self, start: int, problem: str) -> TextError:
        return TextError(f"{place(self._source, start)}: {problem}", self._field)

    def _skip(self, start: int, problem: str) -> None:
        """Raise an error, or add a warning if it is to be skipped."""
        if not self._lenient:
            raise self._error(start, problem)
        self._warn(start, f"{problem}: skipped")

    def _warn(self, start: int, problem: str) -> None:
        if len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(f"{place(self._source, start)}: {problem}")

    def _refuse_doctype(self, *declaration: object) -> None:
        raise self._error(self._position(), "a DOCTYPE is not allowed; leave it out")

    # --- events of the parser

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        start = self._position()
        self._check_element(name, start)
        outer = self._open[-1] if self._open else None
        style = outer.style if outer else PLAIN
        language = attributes.get("xml:lang")
        if language is not None and name != "voice":
            style = replace(style, language=language)
        is_silent = name in SILENT or (outer is not None and outer.is_silent)
        element = _Element(name, style, start, attributes, is_silent)
        if not is_silent:
            self._check_attributes(element)
            if name in BORDERS:
                self._parts.append(Border(start, BORDERS[name]))
            if name == "s":
                element = replace(element, index=len(self._parts))
                inside = self._end_of_tag(start)
                self._parts.append(Mark(MarkKind.SENTENCE, "", inside, inside))
            if name in self._handlers:
                style = self._handlers[name](element) or style
            if name in REPLACING:
                self._replaced = []
        self._open.append(replace(element, style=style))

    def _end(self, name: str) -> None:
        element, end = self._open.pop(), self._position()
        if element.is_silent:
            return
        if name in BORDERS:
            self._parts.append(Border(end, BORDERS[name]))
        if element.index >= 0:
            mark = self._parts[element.index]
            assert isinstance(mark, Mark)
            self._parts[element.index] = replace(mark, end=max(mark.start, end))
        if name in REPLACING:
            self._replace(element, self._source.find(">", end) + 1)

    def _text(self, text: str) -> None:
        start = self._position()
        element = self._open[-1]
        if element.is_silent:
            return
        self._check_characters(text, start)
        if self._replaced is not None:
            self._replaced.append(text)
        else:
            end = self._end_of(text, start)
            self._parts.append(Spoken(text.translate(_SPACES), start, end, element.style))

    def _end_of(self, text: str, start: int) -> int:
        """Return where a text ends in the source: it may be a reference or a line end."""
        source = self._source
        if source[start] == "&" and len(text) == 1:
            end = source.find(";", start, start + 12) + 1
            return end or start + 1
        if source.startswith("\r\n", start):
            return start + 2
        return start + len(text)

    def _end_of_tag(self, start: int) -> int:
        """Return where the tag ends that begins at a position."""
        found = _TAG.match(self._source, start)
        return found.end() if found else start

    # --- checks

    def _check_element(self, name: str, start: int) -> None:
        self._num_elements += 1
        if self._num_elements > MAX_PARTS:
            raise self._error(start, f"has more than {MAX_PARTS} elements")
        if len(self._open) >= MAX_DEPTH:
            raise self._error(start, f"has more than {MAX_DEPTH} elements inside each other")
        if (name == "speak") != (not self._open):
            raise self._error(start, "the root, and only the root, must be <speak>")
        if self._replaced is not None:
            raise self._error(start, f"<{self._open[-1].name}> may only have text inside")
        is_silent = bool(self._open) and self._open[-1].is_silent
        if name not in ATTRIBUTES and not is_silent:
            self._skip(start, f"<{name[:MAX_NAME_CHARACTERS]}> is no element of SSML")

    def _check_attributes(self, element: _Element) -> None:
        name, start = element.name, element.start
        for attribute in element.attributes.keys() - ATTRIBUTES.get(name, element.attributes):
            if ":" not in attribute and attribute != "xmlns":
                shown = attribute[:MAX_NAME_CHARACTERS]
                self._skip(start, f"<{name}> has no attribute {shown}")

    def _check_characters(self, text: str, start: int) -> None:
        try:
            check_text(text, start, self._field)  # character references
        except TextError as error:
            problem = "a character reference names a control character"
            raise self._error(start, problem) from error

    # --- elements

    def _break(self, element: _Element) -> None:
        attributes, start = element.attributes, element.start
        seconds = self._value(
            element, lambda: seconds_of(attributes.get("time"), attributes.get("strength")), 0.0
        )
        if seconds > MAX_BREAK_S:
            self._warn(start, f"the break is shortened to {MAX_BREAK_S:g} s")
        end = self._end_of_tag(start)
        self._parts.append(Break(min(seconds, MAX_BREAK_S), start, end))

    def _prosody(self, element: _Element) -> Style:
        style, given = element.style, element.attributes
        for name in UNAVAILABLE:
            if name in given:
                self._skip(element.start, f"{name} of <prosody> is not available")
        rate, gain_db, pitch = style.rate, style.gain_db, style.pitch
        if "rate" in given:
            rate = self._value(element, lambda: rate_of(given["rate"], style.rate), rate)
        if "volume" in given:
            gain_db = self._value(element, lambda: gain_of(given["volume"], style.gain_db), gain_db)
        if "pitch" in given:
            pitch = self._value(element, lambda: pitch_of(given["pitch"], style.pitch), pitch)
        return replace(style, rate=rate, gain_db=gain_db, pitch=pitch)

    def _voice(self, element: _Element) -> Style:
        given = element.attributes
        for name in WITHOUT_EFFECT:
            if name in given:
                self._warn(element.start, f"{name} of <voice> has no effect")
        named = given.get("name", "")
        names = [named] if "+" in named else named.split()  # a blend, or names by preference
        languages = (given.get("languages") or given.get("language") or "").split()
        language = given.get("xml:lang") or (languages[0].split(":")[0] if languages else "")
        if not names and not language:
            return element.style
        named = names[0] if names else ""
        return replace(element.style, voice=named, voice_language=language, language=language)

    def _mark(self, element: _Element) -> None:
        start, name = element.start, self._required(element, "name")
        self._parts.append(Mark(MarkKind.MARK, name, start, self._end_of_tag(start)))

    def _emphasis(self, element: _Element) -> Style:
        level = element.attributes.get("level", "moderate")
        if level not in EMPHASES:
            self._skip(element.start, f"level must be one of {', '.join(EMPHASES)}")
            return element.style
        return replace(element.style, emphasis="" if level == "none" else level)

    def _audio(self, element: _Element) -> None:
        self._skip(element.start, "<audio> is not available: no addresses are read")

    def _phoneme(self, element: _Element) -> None:
        self._required(element, "ph")
        if element.attributes.get("alphabet", "ipa") != "ipa":
            self._skip(element.start, "alphabet must be ipa")

    def _replace(self, element: _Element, end: int) -> None:
        """Add what is spoken instead of an element's text."""
        written, self._replaced = "".join(self._replaced or ()), None
        given, ipa, said_as = element.attributes, "", None
        match element.name:
            case "sub":
                text = self._required(element, "alias")
            case "phoneme":
                text = " ".join(written.split()) or given["ph"]
                ipa = given["ph"] if given.get("alphabet", "ipa") == "ipa" else ""
            case _:
                kind, layout = self._required(element, "interpret-as"), given.get("format", "")
                text = self._value(element, lambda: say_as(kind, written, layout), "")
                said_as = SayAs(kind, written, layout) if text else None
                text = text or written
        text = text.translate(_SPACES)
        self._parts.append(Spoken(text, element.start, end, element.style, ipa, said_as))

    def _value(self, element: _Element, read: Callable[[], T], otherwise: T) -> T:
        """Return the value of an attribute; `otherwise` if it is wrong and skipped."""
        try:
            return read()
        except ValueError as error:
            self._skip(element.start, f"<{element.name}>: {error}")
            return otherwise

    def _required(self, element: _Element, name: str) -> str:
        value = element.attributes.get(name, "").strip()
        if not value:
            raise self._error(element.start, f"<{element.name}> needs the attribute {name}")
        return value
