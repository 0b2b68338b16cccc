"""vocab.json and merges.txt: the ids of transformers' own reader, and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from llm import CheckpointError
from tests.tts.family_checkpoints import ALPHABET
from tts.checkpoint.tokenizer import TextTokenizer

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "a s", "é e"]
ADDED = {"<|im_start|>": True, "<|im_end|>": True, "<think>": False}
TEXTS = ["hello", "hello world", "as  as\n\n hello!", "Zahl 1234, ja?", "e\u0301e", "日本", ""]


def write(folder: Path, **settings: Any) -> Path:
    """Write a small vocabulary as Qwen publishes it; return the path of a tokenizer.json."""
    letters = [*map(chr, ALPHABET), *(merge.replace(" ", "") for merge in MERGES)]
    letters += ["é"] if "é" not in letters else []
    vocabulary = {letter: index for index, letter in enumerate(dict.fromkeys(letters))}
    first = len(vocabulary)
    added = {
        str(first + place): {"content": name, "special": is_special, "normalized": False}
        for place, (name, is_special) in enumerate(ADDED.items())
    }
    given = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added} | settings
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    lines = ["#version: 0.2", *MERGES, ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder / "tokenizer.json"


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write(tmp_path))
    reference = Qwen2Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
            reference(text).input_ids
        )
    for name in ADDED:
        assert tokenizer.control_id(name) == reference.convert_tokens_to_ids(name)
    assert tokenizer.encode("hello") == [256 + MERGES.index("hell o")]


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no tokenizer model"):
        TextTokenizer(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "merges.txt is of GPT2Tokenizer: Qwen2Tokenizer"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder is broken"),
        ({"added_tokens_decoder": {"7": {}}}, "added_tokens_decoder is broken"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is broken"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TextTokenizer(write(tmp_path, **settings))


def test_without_any_file_the_usual_one_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        TextTokenizer(tmp_path / "tokenizer.json")
