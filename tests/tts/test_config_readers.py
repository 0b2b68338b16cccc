"""No field of the configuration is unread: what nobody acts on is refused, or is not there."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tts.config import AudioGenerationConfig, ServerConfig
from tts.flags import walk_fields

ROOT = Path(__file__).parent.parent.parent
# Taken out of the values before there is a configuration; tested with the files.
CONSUMED_BY_CONFIG = {"config_file", "section_name"}
# What a configuration or one of its sections is called where it is read.
HOLDERS = {"config", "model", "model_config", "server_config", "server", "kv_cache", "cache"}
HOLDERS |= {"sampling", "profiling", "lora", "speculative", "draft_model"}
# These show or declare fields; that is no use of them.
NO_READERS = ("llm/config/report.py", "tts/flags.py")


@cache
def fields_read() -> set[str]:
    """Names that are read of a configuration anywhere in the service."""
    found = set()
    for path in (p for folder in ("llm", "decoder", "tts") for p in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name in NO_READERS or "_pb2" in name:
            continue
        holders = HOLDERS | ({"self"} if name.startswith(("llm/config/", "tts/config")) else set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = ast.unparse(node.value).split(".")[-1].lstrip("_")
                found |= {node.attr} if holder in holders else set()
    return found


ALL_FIELDS = [
    name
    for config_class in (AudioGenerationConfig, ServerConfig)
    for name, _ in walk_fields(config_class)
]


def is_unavailable(name: str) -> bool:
    names = {name, name.split(".", maxsplit=1)[0], name.removeprefix("draft_")}
    return not names.isdisjoint(AudioGenerationConfig.UNAVAILABLE)


@pytest.mark.parametrize("name", sorted(name for name in ALL_FIELDS if not is_unavailable(name)))
def test_every_field_is_read_or_not_available(name: str) -> None:
    """A field is in use when code that acts on it reads it from a configuration."""
    if name not in CONSUMED_BY_CONFIG:
        assert name.rsplit(".", 1)[-1] in fields_read(), f"nothing reads {name}"


def test_a_field_that_nobody_reads_would_be_noticed() -> None:
    assert not {"maximal_length", "audio_decoder_colour", "append", "join"} & fields_read()
    assert len(fields_read() & {name.rsplit(".", 1)[-1] for name in ALL_FIELDS}) > 60
