"""A GGUF file as a folder in Hugging Face's layout.

The folder has what the file's metadata says (configuration, tokenizer, chat template, end tokens)
and a link to the file, from which the weights are read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm import CheckpointError

if TYPE_CHECKING:
    from llm import GGUFFile

SUFFIX = ".gguf"
WRITER = "1"  # of the folder's contents: a change makes new folders
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
LINK = f"model{SUFFIX}"
CONTROL, USER_DEFINED = 3, 4  # types of tokens in GGUF
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Rules that cut a text into the pieces that byte pairs are merged in."""

    pattern: str = ""  # of the pieces; none: GPT-2's
    splits_digits: bool = False
    normalizes: bool = False  # to Unicode's form NFC
    prefers_words: bool = False  # a piece in the vocabulary is not built by merges
    adds_bos: bool = False  # unless the file says otherwise


_LLAMA3 = PreTokenizer(
    _CONTRACTIONS + _WORDS.replace("DIGITS", "1,3") + _SPACES, prefers_words=True, adds_bos=True
)
PRE_TOKENIZERS = {
    "default": PreTokenizer(),
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(splits_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": PreTokenizer(
        _CONTRACTIONS + _WORDS.replace("{DIGITS}", "") + _SPACES, normalizes=True
    ),
}


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file here."""
    path = Path(name).expanduser()
    return path.suffix == SUFFIX and path.is_file()


def gguf_folder(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of a file, which is written once into a cache, the user's by default.

    Raises `CheckpointError` for a file that cannot be read, and for an architecture, a format of
    tensors or a tokenizer that is not supported.
    """
    from llm import GGUFFile  # imports torch

    path = path.expanduser().resolve()
    facts = path.stat()
    key = f"{WRITER} {path} {facts.st_size} {facts.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = (cache or _user_cache()) / "sonant" / "gguf" / f"{path.stem}-{digest}"
    if not _is_whole(folder, path):
        contents = _contents(GGUFFile.read(path))
        try:
            _write(folder, contents, path)
        except OSError as error:
            raise CheckpointError(f"cannot write {folder}: {error}") from error
    return folder


def _user_cache() -> Path:
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:  # a user without an entry and without HOME, as in containers
        raise CheckpointError("GGUF files need a cache: set XDG_CACHE_HOME to a folder") from error


def _is_whole(folder: Path, source: Path) -> bool:
    """Whether a folder has all of its files: programs that clean caches may delete single ones."""
    try:
        for name in FILES:
            json.loads((folder / name).read_bytes())
        return (folder / LINK).samefile(source)
    except (OSError, ValueError):
        return False


def _write(folder: Path, contents: Mapping[str, Any], source: Path) -> None:
    """Write the folder whole, so that another process never sees a part of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    damaged = draft.with_suffix(".damaged")
    try:
        for name in FILES:
            (draft / name).write_text(json.dumps(contents[name]), encoding="utf-8")
        (draft / LINK).symlink_to(source)
        if not _is_whole(folder, source):
            with suppress(FileNotFoundError):
                folder.rename(damaged)
        draft.rename(folder)
    except OSError:
        if not _is_whole(folder, source):  # else another process was first
            raise
    finally:
        for leftover in (draft, damaged):
            shutil.rmtree(leftover, ignore_errors=True)


def _contents(file: GGUFFile) -> dict[str, dict[str, Any]]:
    """Return the JSON files by name."""
    tokens = _tokens(file)
    ends = {_token_id(file, key, tokens) for key in _END_KEYS} - {None}
    named = {name: _token_id(file, key, tokens) for name, key in _NAMED_TOKENS.items()}
    described: dict[str, Any] = {
        name: tokens[token] for name, token in named.items() if token is not None
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        described["chat_template"] = template
    config = file.config()
    if len(tokens) > config["vocab_size"]:
        raise CheckpointError(
            f"{file.path} has {len(tokens)} tokens and {config['vocab_size']} rows of embeddings"
        )
    end = {"eos_token_id": sorted(token for token in ends if token is not None)}
    return {
        "config.json": config | end,
        "generation_config.json": end,
        "tokenizer.json": tokenizer_of(file),
        "tokenizer_config.json": described,
    }


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is no list of tokens")
    return tokens


def _token_id(file: GGUFFile, key: str, tokens: list[str]) -> int | None:
    """Return a token's id; None if the file names none."""
    name = f"tokenizer.ggml.{key}"
    value = file.metadata.get(name)
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise CheckpointError(f"{file.path}: {name}={value!r} is no token's id")
    return value


def tokenizer_of(file: GGUFFile) -> dict[str, Any]:
    """Return the tokenizer.json of a file's byte pairs. Raises `CheckpointError` for other kinds of
    tokenizers and for a pre-tokenizer that is not known.
    """
    read, tokens = file.metadata, _tokens(file)
    kind, name = read.get("tokenizer.ggml.model"), read.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizers of the kind {kind} are not read from GGUF; gpt2's are"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{file.path}: the pre-tokenizer {name} is not known; {known} are")
    merges, types = read.get("tokenizer.ggml.merges"), read.get("tokenizer.ggml.token_type")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges is no list of merges")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.token_type has no type for each token")
    pre = PRE_TOKENIZERS[name]
    added = [
        _added(token, index, is_special=types[index] == CONTROL)
        for index, token in enumerate(tokens)
        if types[index] in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.normalizes else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*_splits(pre), byte_level | {"use_regex": not pre.pattern}],
        },
        "post_processor": _template(file, tokens, pre),
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.prefers_words,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _added(token: str, index: int, *, is_special: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, "special": is_special} | off


def _splits(pre: PreTokenizer) -> list[dict[str, Any]]:
    if pre.splits_digits:
        return [{"type": "Digits", "individual_digits": True}]
    if not pre.pattern:
        return []
    pattern = {"Regex": pre.pattern}
    return [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}]


def _template(file: GGUFFile, tokens: list[str], pre: PreTokenizer) -> dict[str, Any] | None:
    """Return the processor that puts the first token in front of every prompt, if one is."""
    bos = _token_id(file, "bos_token_id", tokens)
    if bos is None or not file.metadata.get("tokenizer.ggml.add_bos_token", pre.adds_bos):
        return None
    special = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, second],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }
