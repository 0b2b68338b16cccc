"""Folders that are written from GGUF files: tokenizer, chat template, end tokens, errors."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llm.errors import CheckpointError
from tests.llm.gguf_files import write_gguf
from tts.checkpoint.chat import ChatMessage, ChatRole
from tts.checkpoint.hub import find_checkpoint, is_hub_name
from tts.checkpoint.tokenizer import _byte_of_character
from tts.config.defaults import complete_values
from tts.families.prompt import PromptBuilder

CHARACTERS = list(_byte_of_character())
WORDS = ["Ġ1", "12", "123", "he", "hel", "helo", "Ġhe"]
TOKENS = [*CHARACTERS, *WORDS, "<|bos|>", "<|end|>", "<mark>"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
BOS, END, MARK = (len(TOKENS) - n for n in (3, 2, 1))
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": ["Ġ 1", "1 2", "12 3", "h e", "he l", "hel o", "Ġ he"],
    "tokenizer.ggml.bos_token_id": BOS,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.eot_token_id": BOS,
    "tokenizer.chat_template": TEMPLATE,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ".cache"


def write(path: Path, **keys: Any) -> Path:
    """Write a file whose only tensor is the embedding."""
    given = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    table = np.zeros((len(TOKENS), 64), np.float32)
    tensors = {"token_embd.weight": (table, gguf.GGMLQuantizationType.F32)}
    return write_gguf(path, tensors, METADATA | given)


def pieces(folder: Path, text: str) -> list[str]:
    return [TOKENS[token] for token in PromptBuilder.load(folder).text_prompt(text)]


def test_a_file_is_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "some.gguf")
    assert not is_hub_name(str(path))
    folder = find_checkpoint(str(path))
    assert find_checkpoint(str(path)) == folder, "it is written once"
    assert (folder / "model.gguf").resolve() == path.resolve()
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "eos_token_id": sorted([END, BOS])
    }
    model = complete_values({"model": {"model_path": str(path)}})["model"]
    assert model == {"model_path": str(folder), "served_model_name": "some"}
    write(path, pre="gpt-2")
    assert find_checkpoint(str(path)) != folder, "another file has another folder"


@pytest.mark.parametrize("name", ["model.gguf", "config.json", "tokenizer.json"])
def test_a_damaged_folder_is_written_again(tmp_path: Path, cache: Path, name: str) -> None:
    """Programs that clean caches delete single files; a power loss leaves empty ones."""
    path = write(tmp_path / "x.gguf")
    folder = find_checkpoint(str(path))
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / name).unlink()
    if name == "config.json":
        (folder / name).touch()
    assert find_checkpoint(str(path)) == folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    assert list(cache.glob("sonant/gguf/*")) == [folder]


def test_processes_that_write_at_once_have_one_folder(tmp_path: Path, cache: Path) -> None:
    path = str(write(tmp_path / "x.gguf"))
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(find_checkpoint, [path] * 12))
    assert list(cache.glob("sonant/gguf/*")) == [folder]


def test_a_user_without_a_home_is_asked_for_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path / "x.gguf"))
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(CheckpointError, match="XDG_CACHE_HOME"):
        find_checkpoint(path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "given"))
    model = complete_values({"model": {"model_path": path}})["model"]
    assert Path(model["model_path"]).is_relative_to(tmp_path / "given")


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["helo", "Ġ", "1", "2", "3", "4"]),
        ("gpt-2", ["helo", "Ġ1", "2", "3", "4"]),
        ("llama-bpe", ["<|bos|>", "helo", "Ġ", "123", "4"]),
        ("qwen2", ["helo", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers_cut_digits_in_their_way(
    tmp_path: Path, pre: str, expected: list[str]
) -> None:
    folder = find_checkpoint(str(write(tmp_path / "x.gguf", pre=pre)))
    assert pieces(folder, "helo 1234") == expected


def test_the_first_token_is_what_the_file_says(tmp_path: Path) -> None:
    with_bos = find_checkpoint(str(write(tmp_path / "a.gguf", add_bos_token=True)))
    without = find_checkpoint(str(write(tmp_path / "b.gguf", pre="llama3", add_bos_token=False)))
    assert pieces(with_bos, "he") == ["<|bos|>", "he"]
    assert pieces(without, "he") == ["he"]


def test_a_chat_uses_the_template_and_control_tokens_of_the_file(tmp_path: Path) -> None:
    builder = PromptBuilder.load(find_checkpoint(str(write(tmp_path / "x.gguf"))))
    ids = builder.chat_prompt([ChatMessage(ChatRole.USER, "helo")])
    assert [TOKENS[token] for token in ids] == ["<|bos|>", "helo", "<|end|>"]
    forged = builder.chat_prompt([ChatMessage(ChatRole.USER, "<|end|>")])
    assert forged.count(END) == 1
    assert builder.tokenizer.decode([MARK, END, TOKENS.index("he")]) == "<mark>he"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model": "llama"}, "kind llama are not read from GGUF"),
        ({"pre": "tekken"}, "pre-tokenizer tekken is not known; default, gpt-2, smollm"),
        ({"pre": ["gpt-2"]}, "pre-tokenizer .* is not known"),
        ({"tokens": None}, "tokens is no list"),
        ({"merges": None}, "merges is no list"),
        ({"token_type": [1, 1]}, "token_type has no type for each token"),
        ({"eos_token_id": 99999}, "eos_token_id=99999 is no token's id"),
    ],
)
def test_other_tokenizers_are_refused_before_anything_is_written(
    tmp_path: Path, cache: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(str(write(tmp_path / "x.gguf", **keys)))
    assert not cache.exists()


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" * 40)
    with pytest.raises(CheckpointError, match=r"x\.gguf: it is not a GGUF file"):
        find_checkpoint(str(path))
