"""The documentation's site: what is generated, and the strict build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from docs.tools.protocol import protocol_reference
from docs.tools.site import GENERATED, on_page_markdown
from tts.v1 import common_pb2, speech_pb2, text_pb2

ROOT = Path(__file__).parents[2]
FILES = (speech_pb2.DESCRIPTOR, text_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR)


class Page:
    """Stand-in for the page that MkDocs hands to a hook: the attributes that are read."""

    def __init__(self, src_uri: str) -> None:
        self.file = self
        self.src_uri = src_uri


@pytest.fixture(scope="module")
def reference() -> str:
    return protocol_reference()


def part(reference: str, name: str) -> str:
    """Return the text under one heading."""
    return re.split(r"\n##+ ", reference.split(f"\n### {name}\n", 1)[1], maxsplit=1)[0]


def test_the_protocol_reference_has_every_element(reference: str) -> None:
    for file in FILES:
        for service in file.services_by_name.values():
            text = part(reference, service.name)
            assert [m.name for m in service.methods if f"`{m.name}`" not in text] == []
        for message in file.message_types_by_name.values():
            text = part(reference, message.name)
            assert [f.name for f in message.fields if f"| `{f.name}` |" not in text] == []
        for enum in file.enum_types_by_name.values():
            text = part(reference, enum.name)
            assert [v.name for v in enum.values if f"| `{v.name}` | {v.number} |" not in text] == []


def test_the_protocol_reference_has_comments_types_and_choices(reference: str) -> None:
    source = (ROOT / "proto/tts/v1/speech.proto").read_text(encoding="utf-8")
    comments = re.findall(r"^  [\w.]+ \w+ = \d+; +// (.+)$", source, flags=re.MULTILINE)
    escaped = [c.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") for c in comments]
    assert len(escaped) > 20
    assert [comment for comment in escaped if comment.strip() not in reference] == []
    chunking = part(reference, "ChunkingConfig")
    assert "| `chunk_sizes` | repeated `int32` |" in chunking
    assert "| `buffer` | `int32` | Optional. " in chunking
    assert "[VoicePrompt](#voiceprompt) | One of `voice`." in part(reference, "VoiceSelection")
    assert "stream of [StreamingSynthesizeRequest]" in part(reference, "SpeechService")


def test_links_of_the_protocol_reference_lead_to_sections(reference: str) -> None:
    headings = {name.lower() for name in re.findall(r"^### (\w+)$", reference, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", reference)) <= headings


def test_a_page_names_files_that_are_not_on_the_site() -> None:
    page = Page("voices.md")
    text = (
        "[card](../tts/embedded/MODEL_CARD.md#x) [CPU](cpu.md) [`LICENSE`](../LICENSE) ![p](a.svg)"
    )
    assert on_page_markdown(text, page) == (
        "card (`tts/embedded/MODEL_CARD.md`) [CPU](cpu.md) `LICENSE` (`LICENSE`) ![p](a.svg)"
    )


def test_generated_parts_stand_where_the_markers_are() -> None:
    markers = {
        marker: path
        for path in (ROOT / "docs").rglob("*.md")
        for marker in re.findall(r"^<!-- generated: (\w+) -->$", path.read_text(), re.MULTILINE)
    }
    assert markers.keys() == GENERATED.keys()
    text = on_page_markdown("<!-- generated: serve -->", Page("reference/configuration.md"))
    assert "--model.kv-cache.num-pages" in text
    assert "<!--" not in text


def test_every_page_is_in_the_menu() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/]+\.md", str(config["nav"]))) == pages


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs MkDocs, the extra docs")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environ, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    python = (tmp_path / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "LoadedVoice" in python
    assert "and return all of its audio" in python
