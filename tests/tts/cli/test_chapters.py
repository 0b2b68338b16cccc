"""Chapters, paragraphs and pieces of plain text and Markdown."""

from __future__ import annotations

import pytest

from tts.cli.book.chapters import (
    BREAK_S,
    CAPITALS,
    CHAPTER,
    PARAGRAPH,
    PARAGRAPH_S,
    PART,
    PIECE_CHARACTERS,
    Book,
    book_of,
    heading_level,
    plain_blocks,
)
from tts.cli.book.markdown import read_markdown
from tts.cli.book.output import safe_name


def read(text: str, *, is_markdown: bool = False) -> Book:
    text, blocks = read_markdown(text) if is_markdown else (text, [*plain_blocks(text)])
    return book_of(text, blocks, "name")


def said(book: Book) -> list[tuple[str, list[str]]]:
    """Return the titles and the texts of the pieces."""
    return [
        (chapter.title, [book.text[piece.start : piece.end] for piece in chapter.pieces])
        for chapter in book.chapters
    ]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("Part One", PART),
        ("BOOK II. The Sea", PART),
        ("Chapter 3", CHAPTER),
        ("CHAPTER III. The Title", CHAPTER),
        ("Chapter Twenty-Two: The end?", CHAPTER),
        ("Chapter 12 The Old Man", CHAPTER),
        ("Chapter 4 — Home", CHAPTER),
        ("Prologue", CHAPTER),
        ("Appendix B", CHAPTER),
        ("THE OLD MAN", CAPITALS),
        ("L’ÉTÉ – 1914", CAPITALS),
        ("Chapter 3 is long.", PARAGRAPH),
        ("Chapter 3 of the book is long", PARAGRAPH),
        ("Part of it", PARAGRAPH),
        ("Chapter Verse", PARAGRAPH),
        ("The introduction", PARAGRAPH),
        ("“NO!”", PARAGRAPH),
        ("NO", PARAGRAPH),
        ("WHAT DID YOU SAY?", PARAGRAPH),
        ("THE END", PARAGRAPH),
        ("1984", PARAGRAPH),
        ("A" * 81, PARAGRAPH),
    ],
)
def test_headings_of_plain_text(line: str, level: int) -> None:
    assert heading_level(line) == level


def test_chapters_of_plain_text() -> None:
    text = (
        "By a hand.\r\n\r\nPART ONE\r\n\r\nChapter 1\r\n\r\nTHE START\r\n\r\n"
        "  It was\r\n  dark.\r\n\r\n* * *\r\n\r\n"
        "Chapter 1 it was.\r\nChapter 2\r\n\r\nChapter 2\r\n\r\nAnd light."
    )
    book = read(text)
    assert said(book) == [
        ("name", ["By a hand."]),
        (
            "PART ONE - Chapter 1 - THE START",
            [
                *("PART ONE", "Chapter 1", "THE START", "It was\r\n  dark."),
                "Chapter 1 it was.\r\nChapter 2",
            ],
        ),
        ("Chapter 2", ["Chapter 2", "And light."]),
    ]
    assert [piece.pause_s for piece in book.pieces] == [
        *(BREAK_S, PARAGRAPH_S, PARAGRAPH_S, PARAGRAPH_S, BREAK_S, BREAK_S, PARAGRAPH_S, BREAK_S)
    ]
    assert book.has_text
    assert not read("Chapter 1\n\nChapter 2\n").has_text


MARKDOWN = """---
title: metadata
---

Title
=====

## Sub *title* [here](https://example.org)

Soft
break, **bold**, ~~old~~, `code` &amp; ![a map](map.png)<br>end<!-- hidden -->.

### Deeper

> 3. third
> 4. fourth
>
>    more

| a | b |
|---|---|
| 1 |   |

```
code
```

    code

<div>html</div>

---

Last [1] *

Another
-------
"""


def test_markdown_is_read_as_prose() -> None:
    book = read(MARKDOWN, is_markdown=True)
    assert said(book) == [
        (
            "Title - Sub title here",
            [
                *("Title", "Sub title here", "Soft break, bold, old, code & a map end."),
                *("Deeper", "3. third", "4. fourth", "more", "a, b.", "1.", "Last [1] *"),
            ],
        ),
        ("Another", ["Another"]),
    ]
    assert [n for n, piece in enumerate(book.pieces) if piece.pause_s == BREAK_S] == [8, 9, 10]


@pytest.mark.parametrize(
    "text",
    [
        "---\n\nText.\n",  # a rule
        "--- \nno end\n",
    ],
)
def test_a_rule_at_the_beginning_is_no_metadata(text: str) -> None:
    assert read(text, is_markdown=True).has_text


@pytest.mark.parametrize(
    "text",
    [
        "He said that Mr. Smith would come. " * 60,
        "some words without an end " * 60,
        "one, two; three: " * 90,
        "一二三四五六七八九十。" * 120,
        "x" * 1800,
        "a" + " " * 2000 + "b. " * 400,
    ],
)
def test_long_paragraphs_are_cut_and_nothing_is_lost(text: str) -> None:
    book = read(text)
    pieces = [text[piece.start : piece.end] for piece in book.pieces]
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert len(pieces) > 1
    assert {piece.pause_s for piece in book.pieces[:-1]} == {0.0}
    if text[0] == "H":
        assert all(piece.rstrip().endswith("come.") for piece in pieces)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ('A/B\\C:D*E?"F<G>|H\x00', "A B C D E F G H"),
        ("..", ""),
        (" The  End. ", "The End"),
        ("é" * 200, "é" * 60),
    ],
)
def test_names_of_files_are_safe(title: str, name: str) -> None:
    assert safe_name(title) == name


def test_a_long_title_and_ten_thousand_headings() -> None:
    assert len(read(f"# {'word ' * 99}\n\nText.", is_markdown=True).chapters[0].title) <= 120
    assert len(read("# One\n\nText.\n\n" * 10_000, is_markdown=True).chapters) == 10_000
