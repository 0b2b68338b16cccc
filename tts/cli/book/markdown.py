"""Markdown as prose: what a reader would say, and where its chapters begin.

Signs of markup are not spoken; link texts, inline code and the descriptions of pictures are. Tables
are read row by row, items of numbered lists with their numbers. Blocks of code, HTML and the
metadata at the beginning are left out, and a rule is a break.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tts.cli.book.chapters import CHAPTER, PARAGRAPH, PART, Block

LEVELS = {"h1": PART, "h2": CHAPTER}  # deeper headings are spoken inside of their chapter
SEPARATOR = "\n\n"


def read_markdown(source: str) -> tuple[str, list[Block]]:
    """Return the prose of a Markdown document, and its blocks."""
    parser = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    text, position, blocks = [], 0, []
    for content, level in _paragraphs(parser.parse(_without_metadata(source))):
        blocks.append(Block(position, position + len(content), level))
        text.append(content)
        position += len(content) + len(SEPARATOR)
    return SEPARATOR.join(text), blocks


def _without_metadata(source: str) -> str:
    """Return a document without the lines between `---` at its beginning."""
    first, *lines = source.split("\n")
    ends = [n for n, line in enumerate(lines) if line.rstrip() in ("---", "...")]
    if first.rstrip() != "---" or not ends or not lines[0].strip():
        return source
    return "\n".join(lines[ends[0] + 1 :])


def _paragraphs(tokens: Sequence[Token]) -> Iterator[tuple[str, int]]:
    """Yield the paragraphs of a document with their levels; an empty one is a break."""
    level, number = PARAGRAPH, ""
    cells: list[str] | None = None  # of a table's row
    for token in tokens:
        match token.type:
            case "heading_open":
                level = LEVELS.get(token.tag, PARAGRAPH)
            case "heading_close":
                level = PARAGRAPH
            case "list_item_open":
                number = f"{token.info}. " if token.info else ""
            case "tr_open":
                cells = []
            case "tr_close":
                yield ", ".join(filter(None, cells or ())) + ".", PARAGRAPH
                cells = None
            case "hr":
                yield "", PARAGRAPH
            case "inline" if cells is not None:
                cells.append(_prose(token))
            case "inline":
                yield number + _prose(token), level
                number = ""


def _prose(inline: Token) -> str:
    """Return the words of a paragraph on one line."""
    return " ".join("".join(_words(inline.children or ())).split())


def _words(tokens: Sequence[Token]) -> Iterator[str]:
    for token in tokens:
        match token.type:
            case "text" | "code_inline":
                yield token.content
            case "image":
                yield from _words(token.children or ())
            case "softbreak" | "hardbreak":
                yield " "
            case "html_inline" if token.content.startswith("<br"):
                yield " "
