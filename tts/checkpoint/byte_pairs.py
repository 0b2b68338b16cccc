"""Qwen's tokenizer as vocab.json and merges.txt, in the form of a tokenizer.json.

Repositories such as Qwen3-TTS have no tokenizer.json: the pieces of a text are those of the class
that tokenizer_config.json names, which also lists the control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm import CheckpointError
from tts.checkpoint.files import read_json
from tts.checkpoint.gguf import PRE_TOKENIZERS

VOCABULARY, MERGES, SETTINGS = "vocab.json", "merges.txt", "tokenizer_config.json"
CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_tokenizer(path: Path) -> Mapping[str, Any]:
    """Return the content of a tokenizer.json; without it, that of the files next to it.

    Raises CheckpointError for files that cannot be read, and for another tokenizer.
    """
    vocabulary, merges = path.with_name(VOCABULARY), path.with_name(MERGES)
    if path.is_file() or not (vocabulary.is_file() and merges.is_file()):
        return read_json(path)
    settings_path = path.with_name(SETTINGS)
    settings = read_json(settings_path)
    kind = settings.get("tokenizer_class")
    if kind not in CLASSES:
        raise CheckpointError(
            f"{path.parent} has no {path.name}, and {MERGES} is of {kind}: {CLASSES[0]} can be read"
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    pattern = {"Regex": PRE_TOKENIZERS["qwen2"].pattern}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(settings.get("added_tokens_decoder"), settings_path),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, byte_level | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": byte_level | {"use_regex": True},
        "model": {"type": "BPE", "vocab": read_json(vocabulary), "merges": _read_merges(merges)},
    }


def _added_tokens(given: Any, path: Path) -> list[dict[str, Any]]:
    try:
        return [
            {"id": int(index), "content": token["content"]}
            | {flag: bool(token.get(flag, False)) for flag in _FLAGS}
            for index, token in (given or {}).items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is broken: {error!r}") from error


def _read_merges(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if lines[0].startswith("#version"):
        del lines[0]
    return [line for line in lines if line.strip()]
