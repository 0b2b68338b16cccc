"""Files of pronunciations: their formats, errors with the line, limits, and changes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llm import ConfigError
from tts.text.lexicon import files
from tts.text.lexicon.entries import Alphabet, Lexicon, Pronunciation
from tts.text.lexicon.files import check_lexicon, load_lexicon
from tts.text.lexicon.watched import WatchedLexicons

IPA, ARPABET = Alphabet.IPA, Alphabet.ARPABET
PLS = """<?xml version="1.0" encoding="UTF-8"?>
<!-- a comment -->
<lexicon version="1.0" xmlns="http://www.w3.org/2005/01/pronunciation-lexicon"
    alphabet="ipa" xml:lang="en-US" xmlns:x="https://example.org">
  <meta name="author" content="me"/>
  <metadata><x:any><lexeme>what is here is skipped</lexeme></x:any></metadata>
  <lexeme>
    <grapheme>SQL</grapheme>
    <grapheme>Structured
      Query Language</grapheme>
    <alias>sequel</alias>
    <example>We speak SQL.</example>
  </lexeme>
  <lexeme><grapheme>caf\u00e9</grapheme>
    <phoneme>\u02c8k\u00e6fe\u026a</phoneme><phoneme prefer="true">k\u0259\u02c8fe\u026a</phoneme>
  </lexeme>
  <lexeme role="x:verb"><grapheme>read</grapheme><phoneme>\u0279\u025bd</phoneme></lexeme>
  <lexeme><grapheme>AT&amp;T</grapheme><phoneme alphabet="ipa">e\u026a</phoneme></lexeme>
</lexicon>
"""
CMUDICT = """;;; # CMUdict  --  Major Version: 0.07
TOMATO  T AH0 M EY1 T OW2
TOMATO(1)  T AH0 M AA1 T OW2
'BOUT  B AW1 T
aalborg AO1 L B AO0 R G # place, danish
A.  EY1
THE  DH AH
"""
COLUMNS = """# a comment
SQL\tsequel
New York\t/nuː jɔɹk/

tomato \t T AH0 M EY1 T OW2
#1\tnumber one
IBM\tAY BEE EM
"""


def load(tmp_path: Path, text: str | bytes, name: str = "words.txt") -> Lexicon:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_lexicon(path, lambda entry: entry, ascii_only=False)


def test_the_pronunciation_lexicon_specification(tmp_path: Path) -> None:
    lexicon = load(tmp_path, PLS, "words.pls")
    assert lexicon.language == "en-US"
    assert lexicon.entries == {
        "SQL": Pronunciation("SQL", "sequel"),
        "Structured Query Language": Pronunciation("Structured Query Language", "sequel"),
        "café": Pronunciation("café", "kəˈfeɪ", IPA),
        "AT&T": Pronunciation("AT&T", "eɪ", IPA),
    }


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_cmudict_has_words_in_any_case_and_one_pronunciation_each(
    tmp_path: Path, start: bytes
) -> None:
    lexicon = load(tmp_path, start + CMUDICT.replace("\n", "\r\n").encode())
    assert lexicon.entries == {
        word: Pronunciation(word, phones, ARPABET)
        for word, phones in {
            "tomato": "T AH0 M EY1 T OW2",
            "'bout": "B AW1 T",
            "aalborg": "AO1 L B AO0 R G",
            "a.": "EY1",
            "the": "DH AH",
        }.items()
    }


def test_columns_have_respellings_ipa_or_arpabet(tmp_path: Path) -> None:
    assert list(load(tmp_path, COLUMNS).entries.values()) == [
        Pronunciation("SQL", "sequel"),
        Pronunciation("New York", "nuː jɔɹk", IPA),
        Pronunciation("tomato", "T AH0 M EY1 T OW2", ARPABET),
        Pronunciation("#1", "number one"),
        Pronunciation("IBM", "AY BEE EM"),
    ]


def pls(inside: str, root: str = "<lexicon>") -> str:
    return f"{root}\n{inside}\n</lexicon>"


WORD = "<lexeme><grapheme>a</grapheme>{}</lexeme>"
DEEP = "<metadata>" * 40 + "</metadata>" * 40
LAUGHS = "<!DOCTYPE lexicon [<!ENTITY a 'ha'><!ENTITY b '&a;&a;&a;'>]>\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("SQL\tsequel\nhello there", 2, "write a phrase, a tab, and its respelling or /IPA/"),
        ("SQL", 1, "write a phrase, a tab"),
        ("a\tb\tc", 1, "has 3 columns"),
        ("ok\tokay\n🎉\tparty", 2, "the phrase has no letters"),
        ("a\t" + "x" * 201, 1, "the pronunciation must have 1 to 200 characters"),
        ("x" * 201 + "\ty", 1, "the phrase must have 1 to 200 characters"),
        ("x" * 100_000 + "\ty", 1, "the line has 100002 bytes"),
        ("a\t/w日d/", 1, "'日' is no sign of the International Phonetic Alphabet"),
        ("a\tb\x07", 1, "has a control character"),
        ("HELLO  HH AH0 L XX1", 1, "write a phrase, a tab"),
        (b"one\tx\ntwo\t\xff\xfe", 2, "byte 5 of the line is not UTF-8; save the file as UTF-8"),
        (b"<lexicon>\n\xe9</lexicon>", 2, "is not UTF-8"),
        ("<lexicon>\n<lexeme>", 2, "no element found"),
        ("<speak>hello</speak>", 1, "the root, and only the root, must be <lexicon>"),
        (pls("<lexicon/>"), 2, "the root, and only the root"),
        (pls("<word/>"), 2, "<word> is no element of a pronunciation lexicon"),
        (pls("<grapheme>a</grapheme>"), 2, "<grapheme> must stand in a <lexeme>"),
        (pls("<lexeme><grapheme>a<alias/></grapheme></lexeme>"), 2, "must stand in a <lexeme>"),
        (pls(WORD.format("")), 2, "needs a <grapheme>, and a <phoneme> or an <alias>"),
        (pls(WORD.format("<alias></alias>")), 2, "the pronunciation must have 1 to 200"),
        (pls(WORD.format("<phoneme alphabet='x-sampa'>a</phoneme>")), 2, "alphabet 'x-sampa' is"),
        (
            pls(WORD.format("<phoneme>a</phoneme>"), "<lexicon alphabet='x-sampa'>"),
            2,
            "alphabet 'x-sampa' is not available; write ipa",
        ),
        (pls(WORD.format("\n<alias>" + "x" * 9999 + "</alias>")), 3, "<alias> has more than 200"),
        (pls(DEEP), 2, "has more than 16 elements inside each other"),
        (LAUGHS + pls(WORD.format("<alias>&b;</alias>")), 1, "a DOCTYPE is not allowed"),
        (pls(WORD.format("<alias>&b;</alias>")), 2, "undefined entity"),
    ],
)
def test_errors_name_the_file_and_the_line(
    tmp_path: Path, text: str | bytes, line: int, message: str
) -> None:
    path = tmp_path / "words.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        check_lexicon(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("none", "cannot be read"), (".", "not a file"), ("pipe", "not a file")):
        with pytest.raises(ConfigError, match=message):
            check_lexicon(tmp_path / name)


@pytest.mark.parametrize("kind", ["lines", "xml"])
def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "MAX_ENTRIES", 20)
    lines = "\n".join(f"w{n}\tx" for n in range(30))
    lexemes = "".join(f"<grapheme>w{n}</grapheme>" for n in range(30))
    text = lines if kind == "lines" else pls(f"<lexeme>{lexemes}<alias>x</alias></lexeme>")
    with pytest.raises(ConfigError, match="a lexicon may have 20 entries, this is one more"):
        load(tmp_path, text)
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="has more than 100 bytes"):
        load(tmp_path, text)


# --- files that change


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the clock of `WatchedLexicons`."""
    passed = [0.0]
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed[0])

    def advance(seconds: float) -> None:
        passed[0] += seconds

    return advance


def watched(*paths: Path) -> WatchedLexicons:
    return WatchedLexicons(paths, lambda p: load_lexicon(p, lambda e: e, ascii_only=True))


def spoken(lexicons: WatchedLexicons, phrase: str) -> str:
    """Return what the first lexicon that has a phrase says for it."""
    found = (lexicon.get(phrase) for lexicon in lexicons.current())
    return next((said.spoken for said in found if said is not None), "")


def wait_for(
    lexicons: WatchedLexicons, phrase: str, expected: str, now: Callable[..., None]
) -> None:
    deadline = time.perf_counter() + 60
    while spoken(lexicons, phrase) != expected:
        assert time.perf_counter() < deadline
        now(1.1)
        time.sleep(0.01)


def test_the_file_named_last_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one\ta\ntwo\tb\n")
    second.write_text("one\tc\n")
    lexicons = watched(first, second)
    assert (spoken(lexicons, "one"), spoken(lexicons, "two")) == ("c", "b")
    assert "a.txt" in repr(lexicons)


def test_a_changed_file_is_read_again(
    tmp_path: Path, now: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "words.txt"
    path.write_text("one\ta\n")
    lexicons = watched(path)
    path.write_text("one\tbee\n")
    assert spoken(lexicons, "one") == "a"  # files are looked at once in a second
    wait_for(lexicons, "one", "bee", now)
    replaced = tmp_path / "new.txt"
    replaced.write_text("one\tsee\n")
    replaced.replace(path)
    wait_for(lexicons, "one", "see", now)
    assert [record.getMessage() for record in caplog.records] == [
        f"lexicon {path}: 1 phrases",
        f"lexicon {path}: 1 phrases, read again",
        f"lexicon {path}: 1 phrases, read again",
    ]


def test_a_broken_or_removed_file_leaves_the_former_lexicon(
    tmp_path: Path, now: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "words.txt", tmp_path / "other.txt"
    path.write_text("one\ta\n")
    other.write_text("two\tb\n")
    lexicons = watched(path, other)
    path.write_text("one\tbee\nbroken line\n")
    other.unlink()
    now(1.1)
    lexicons.current()
    for _ in range(5):  # one line in the log for each file, however often it is looked at
        wait_for(lexicons, "one", "a", now)
        now(1.1)
        wait_for(lexicons, "two", "b", now)
    deadline = time.perf_counter() + 60
    warnings: list[str] = []
    while len(warnings) < 2 and time.perf_counter() < deadline:
        time.sleep(0.01)
        found = [r for r in caplog.records if r.levelno == logging.WARNING]
        warnings = sorted(record.getMessage() for record in found)
    assert len(warnings) == 2
    assert warnings[0].startswith(f"{other}: cannot be read: ")
    assert warnings[1].startswith(f"{path}:2: write a phrase, a tab")
    assert all(text.endswith("; the former lexicon stays in use") for text in warnings)
    other.write_text("two\tagain\n")
    wait_for(lexicons, "two", "again", now)


def test_a_broken_file_that_is_not_required_is_left_out_until_it_is_mended(
    tmp_path: Path, now: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    path, other, missing = (tmp_path / name for name in ("words.txt", "other.txt", "none.txt"))
    path.write_text("broken line\n")
    other.write_text("two\tb\n")
    with pytest.raises(ConfigError, match=r"words\.txt:1: "):
        watched(other, path)
    read = partial(load_lexicon, adapt=lambda e: e, ascii_only=True)
    lexicons = WatchedLexicons((path, other, missing), read, is_required=False)
    assert (spoken(lexicons, "one"), spoken(lexicons, "two")) == ("", "b")
    assert lexicons.num_broken == 2
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert [text.endswith("it is left out until it is mended") for text in errors] == [True] * 2
    path.write_text("one\ta\n")
    missing.write_text("three\tc\n")
    wait_for(lexicons, "one", "a", now)
    wait_for(lexicons, "three", "c", now)
    assert lexicons.num_broken == 0


def test_a_file_that_is_not_due_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "words.txt"
    path.write_text("one\ta\n")
    lexicons = watched(path)
    monkeypatch.setattr(Path, "stat", lambda path: pytest.fail("a file was looked at"))
    for _ in range(100):
        assert spoken(lexicons, "one") == "a"
