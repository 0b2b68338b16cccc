"""Files of pronunciations: W3C's Pronunciation Lexicon Specification, CMUdict, and columns.

    <lexeme><grapheme>SQL</grapheme><alias>sequel</alias></lexeme>      XML, if it begins with <
    TOMATO  T AH0 M EY1 T OW2                                           a word and ARPAbet
    New York → noo york, SQL → /ˈsiːkwəl/                               with a tab for the arrow

Addresses, entities and DTDs are never read. https://www.w3.org/TR/pronunciation-lexicon/
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from xml.parsers import expat

from llm import ConfigError
from tts.text.clean import TextError, check_text
from tts.text.lexicon.alphabets import arpabet_to_ipa, bare_ipa, check_signs, is_arpabet
from tts.text.lexicon.entries import MAX_PHRASE_CHARACTERS, Alphabet, Lexicon, Pronunciation

MAX_BYTES = 32 * 2**20
MAX_ENTRIES = 250_000
MAX_DEPTH = 16
NAMESPACE = "http://www.w3.org/2005/01/pronunciation-lexicon"
_LANGUAGE = "http://www.w3.org/XML/1998/namespace lang"
_ELEMENTS = frozenset(
    {"lexicon", "lexeme", "grapheme", "phoneme", "alias", "example", "meta", "metadata"}
)
_TEXTS = ("grapheme", "phoneme", "alias")
_COMMENTS = (b";;;", b"# ")
_ALTERNATIVE = re.compile(r"\(\d+\)")  # "TOMATO(2)"
_BOM = b"\xef\xbb\xbf"

Entries = Iterator[tuple[int, Pronunciation]]
"""Entries with their lines, from 1."""


def load_lexicon(
    path: Path, adapt: Callable[[Pronunciation], Pronunciation], *, ascii_only: bool
) -> Lexicon:
    """Return the lexicon in a file. `adapt` returns an entry as the model reads it, or raises
    ValueError; `ascii_only`: as in the options of texts.

    Raises ConfigError.
    """
    data = _read(path)
    line = 0

    def adapted(entries: Entries) -> Iterator[Pronunciation]:
        nonlocal line
        for number, (at, entry) in enumerate(entries):
            line = at
            if number >= MAX_ENTRIES:
                raise ValueError(f"a lexicon may have {MAX_ENTRIES} entries, this is one more")
            _check(entry)
            yield adapt(entry)

    try:
        if data.lstrip().startswith(b"<"):
            parser = _PlsParser(data, path)
            entries = parser.entries()
            return Lexicon.of(adapted(entries), ascii_only=ascii_only, language=parser.language)
        return Lexicon.of(adapted(_lines(data, path)), ascii_only=ascii_only)
    except ConfigError:
        raise
    except ValueError as error:
        raise _error(path, line, str(error)) from error


def check_lexicon(path: Path) -> None:
    """Raise ConfigError for a file that no model can read."""
    load_lexicon(path, _checked, ascii_only=False)


def _checked(entry: Pronunciation) -> Pronunciation:
    match entry.alphabet:
        case Alphabet.IPA:
            check_signs(entry.spoken)
        case Alphabet.ARPABET:
            arpabet_to_ipa(entry.spoken)
    return entry


def _error(path: Path, line: int, problem: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {problem}")


def _read(path: Path) -> bytes:
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
        data = b""
        if is_file:  # reading any other kind might never end
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if not is_file:
        raise ConfigError(f"{path}: is not a file")
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_BYTES} bytes")
    return data.removeprefix(_BOM)


def _check(entry: Pronunciation) -> None:
    """Raise ValueError for an entry that is empty, too long, or no text."""
    for name, value in (("phrase", entry.phrase), ("pronunciation", entry.spoken)):
        if not value or len(value) > MAX_PHRASE_CHARACTERS:
            raise ValueError(f"the {name} must have 1 to {MAX_PHRASE_CHARACTERS} characters")
    try:
        check_text(entry.phrase + entry.spoken)
    except TextError as error:
        raise ValueError("has a control character") from error


# --- lines


def _lines(data: bytes, path: Path) -> Entries:
    for number, raw in enumerate(BytesIO(data), start=1):
        if raw.startswith(_COMMENTS) or not raw.strip():
            continue
        try:
            entry = _entry(_text_of(raw))
        except ValueError as error:
            raise _error(path, number, str(error)) from error
        if entry is not None:
            yield number, entry


def _text_of(raw: bytes) -> str:
    if len(raw) > 16 * MAX_PHRASE_CHARACTERS:
        raise ValueError(f"the line has {len(raw)} bytes")
    try:
        return raw.decode().strip()
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
        raise ValueError(problem) from error


def _entry(line: str) -> Pronunciation | None:
    """Return the entry of a line; None for a second pronunciation of a word."""
    columns = [column.strip() for column in line.split("\t")]
    if len(columns) > 2:
        raise ValueError(f"has {len(columns)} columns; write a phrase, a tab, and its sound")
    if len(columns) == 2:
        return _of_columns(*columns)
    word, _, rest = line.partition(" ")
    phones = rest.partition(" #")[0].strip()  # a comment follows
    if not phones or not is_arpabet(f"{phones} AH0"):  # phones may be without a stress
        text = "write a phrase, a tab, and its respelling or /IPA/; or a word and its ARPAbet"
        raise ValueError(text)
    if word.endswith(")") and _ALTERNATIVE.search(word):
        return None
    return Pronunciation(word.lower(), phones, Alphabet.ARPABET)  # capitals have no meaning


def _of_columns(phrase: str, spoken: str) -> Pronunciation:
    if len(spoken) > 2 and spoken.startswith("/") and spoken.endswith("/"):
        return Pronunciation(phrase, bare_ipa(spoken), Alphabet.IPA)
    alphabet = Alphabet.ARPABET if is_arpabet(spoken) else Alphabet.LETTERS
    return Pronunciation(phrase, spoken, alphabet)


# --- XML


class _PlsParser:
    """Handlers of one parse. Elements of other namespaces are skipped."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._data, self._path = data, path
        self.language = ""
        self._open: list[str] = []
        self._alphabets: list[str] = []  # of the open elements
        self._text: list[str] | None = None  # inside an element of _TEXTS
        self._num_characters = 0
        self._line = 0  # of the lexeme
        self._is_role = False
        self._graphemes: list[str] = []
        self._spoken: list[tuple[bool, Pronunciation]] = []  # whether preferred; without a phrase
        self._entries: list[tuple[int, Pronunciation]] = []
        self._parser = parser = expat.ParserCreate("UTF-8", " ")
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._characters
        parser.StartDoctypeDeclHandler = self._refuse_doctype

    def entries(self) -> Entries:
        """Return all entries. Raises ConfigError."""
        try:
            self._data.decode()
            self._parser.Parse(self._data, True)
        except UnicodeDecodeError as error:
            line = self._data.count(b"\n", 0, error.start) + 1
            raise _error(self._path, line, "is not UTF-8; save the file as UTF-8") from error
        except expat.ExpatError as error:
            raise _error(self._path, error.lineno, expat.ErrorString(error.code)) from error
        return iter(self._entries)

    def _error(self, problem: str) -> ConfigError:
        return _error(self._path, self._parser.CurrentLineNumber, problem)

    def _refuse_doctype(self, *declaration: object) -> None:
        raise self._error("a DOCTYPE is not allowed; leave it out")

    def _start(self, qualified: str, attributes: dict[str, str]) -> None:
        namespace, _, name = qualified.rpartition(" ")
        is_ours = namespace in ("", NAMESPACE) and "" not in self._open
        if len(self._open) >= MAX_DEPTH:
            raise self._error(f"has more than {MAX_DEPTH} elements inside each other")
        if is_ours or not self._open:
            self._check_element(name)
            inherited = self._alphabets[-1] if self._alphabets else "ipa"
            self._alphabets.append(attributes.get("alphabet", inherited))
            self._begin(name, attributes)
        self._open.append(name if is_ours else "")

    def _check_element(self, name: str) -> None:
        outer = self._open[-1] if self._open else ""
        if (name == "lexicon") != (not self._open):
            raise self._error("the root, and only the root, must be <lexicon>")
        if name not in _ELEMENTS:
            raise self._error(f"<{name[:40]}> is no element of a pronunciation lexicon")
        if name in _TEXTS and outer != "lexeme":
            raise self._error(f"<{name}> must stand in a <lexeme>")
        if self._text is not None:
            raise self._error(f"<{outer}> may only have text inside")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        if name == "lexicon":
            self.language = attributes.get(_LANGUAGE, "")
        elif name == "lexeme":
            self._line = self._parser.CurrentLineNumber
            self._is_role = "role" in attributes
            self._graphemes, self._spoken = [], []
        elif name in _TEXTS:
            self._text, self._num_characters = [], 0
            self._is_preferred = attributes.get("prefer") == "true"

    def _characters(self, text: str) -> None:
        if self._text is None:
            return
        self._num_characters += len(text)
        if self._num_characters > 16 * MAX_PHRASE_CHARACTERS:
            raise self._error(
                f"<{self._open[-1]}> has more than {MAX_PHRASE_CHARACTERS} characters"
            )
        self._text.append(text)

    def _end(self, qualified: str) -> None:
        name = self._open.pop()
        if not name:
            return
        alphabet = self._alphabets.pop()
        if name in _TEXTS:
            text, self._text = " ".join("".join(self._text or ()).split()), None
            self._take(name, text, alphabet)
        elif name == "lexeme":
            self._end_lexeme()

    def _take(self, name: str, text: str, alphabet: str) -> None:
        match name:
            case "grapheme":
                self._graphemes.append(text)
                return
            case "phoneme":
                if alphabet != "ipa":
                    raise self._error(f"alphabet '{alphabet[:40]}' is not available; write ipa")
                said = Pronunciation("", bare_ipa(text), Alphabet.IPA)
            case _:
                said = Pronunciation("", text)
        self._spoken.append((self._is_preferred, said))

    def _end_lexeme(self) -> None:
        """Add a lexeme's entries: its preferred pronunciation, else the first."""
        if not self._graphemes or not self._spoken:
            raise self._error("a <lexeme> needs a <grapheme>, and a <phoneme> or an <alias>")
        if self._is_role:  # texts have no roles: this may be another word
            return
        said = next((said for is_preferred, said in self._spoken if is_preferred), None)
        said = said or self._spoken[0][1]
        self._entries += [
            (self._line, Pronunciation(phrase, said.spoken, said.alphabet))
            for phrase in self._graphemes
        ]
        if len(self._entries) > MAX_ENTRIES:
            raise self._error(f"a lexicon may have {MAX_ENTRIES} entries, this is one more")
