"""The hooks of `mkdocs build`: pages that are generated, and links that leave the folder `docs`."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"`[^`\n]*`|(!?)\[([^\]]*)\]\(([^)\s]+)\)")  # code holds no links
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page as it is rendered; MkDocs calls it for each page."""
    folder = (DOCS / page.file.src_uri).parent
    found = LINK.sub(lambda link: _inside(link, folder), markdown)
    return MARKER.sub(lambda marker: GENERATED[marker[1]](), found)


def _inside(link: re.Match[str], folder: Path) -> str:
    """Return the link; for a file that is no page of the site, its name in the repository."""
    is_image, text, target = link.groups()
    if target is None:
        return link[0]
    path = target.partition("#")[0]
    if is_image or not path or "://" in target:
        return link[0]
    resolved = (folder / path).resolve()
    if resolved.is_relative_to(DOCS):
        return link[0]
    name = str(resolved.relative_to(ROOT))
    return f"`{name}`" if text == name else f"{text} (`{name}`)"


def _protocol() -> str:
    from docs.tools.protocol import protocol_reference

    return protocol_reference()


def _help(parser: ArgumentParser) -> str:
    return f"```text\n{parser.format_help()}```"


def _serve() -> str:
    from tts.serve import build_parser

    return _help(build_parser(show_all=True))


def _say() -> str:
    from tts.say import build_parser

    return _help(build_parser(show_all=True))


GENERATED: Mapping[str, Callable[[], str]] = {
    "protocol": _protocol,
    "serve": _serve,
    "say": _say,
}
"""Replacements of `<!-- generated: NAME -->` in a page."""
