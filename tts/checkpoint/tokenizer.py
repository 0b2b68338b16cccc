"""Text to token ids and back, with control tokens separate from text.

`tokenizer.json` is split into the text model (byte pairs, vocabulary) and the added tokens. Only
the text model encodes text, so "<|s_12|>" in it is eight characters. Control tokens are found by
name.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from llm import CheckpointError, RequestError
from tts.checkpoint.byte_pairs import read_tokenizer

_META_SPACE = "▁"


class TextTokenizer:
    """Tokenizer of a checkpoint's tokenizer.json, or of the files that stand in for it."""

    def __init__(self, path: Path) -> None:
        data = read_tokenizer(path)
        _check_model(data.get("model"), path)
        added = _checked_tokens(data.get("added_tokens") or [], path)
        self._control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
        self._hidden_ids = {token["id"] for token in added if token.get("special")}
        self._control_texts = {token["id"]: token["content"] for token in added}
        self._lengths_by_first = _lengths_by_first(self._control_ids)
        stripped = {**data, "added_tokens": [], "padding": None, "truncation": None}
        self._model = _model_of(stripped, path)
        self._is_byte_level = _is_byte_level(data.get("decoder"), path)
        self.drops_first_space = not self._is_byte_level
        """Whether the model writes a space before the first word, as sentence-piece models do."""

    def control_id(self, name: str) -> int:
        """Return the id of a control token. Raises CheckpointError for an unknown name."""
        if name not in self._control_ids:
            raise CheckpointError(f"tokenizer.json has no token {name}")
        return self._control_ids[name]

    def find(self, name: str) -> int | None:
        """Return the id of a control token; None for an unknown name."""
        return self._control_ids.get(name)

    @property
    def num_tokens(self) -> int:
        """Number of ids: the largest one plus 1."""
        largest = max(self._control_texts, default=-1)
        return max(largest + 1, self._model.get_vocab_size(with_added_tokens=False))

    def encode(self, text: str, *, with_template: bool = False) -> list[int]:
        """Encode plain text. `with_template` adds the tokens that surround every prompt.

        Raises RequestError if a token of the text model is a special one. (Other added tokens may
        be text: Gemma lists its line breaks among them.)
        """
        encoded = self._model.encode(text, add_special_tokens=False)
        ids: list[int] = encoded.ids
        if not self._hidden_ids.isdisjoint(ids):
            raise RequestError("the text holds a control token of this model")
        if with_template and text:
            ids = self._model.post_process(encoded).ids
        return ids

    def encode_marked(self, text: str, guard: str) -> list[int]:
        """Encode a rendered template with its control tokens, except those split by `guard`.

        The guard characters are removed from the text.
        """
        ids: list[int] = []
        for plain, control in self._split(text):
            ids += self.encode(plain.replace(guard, "")) if plain else []
            ids += [self._control_ids[control]] if control else []
        return ids

    def guarded(self, text: str, guard: str) -> str:
        """Return the text with `guard` inside all that is or could become a control token."""
        pieces, done = [], 0
        for start, _ in self._occurrences(text, partial=True):
            pieces += [text[done : start + 1], guard]
            done = start + 1
        return "".join([*pieces, text[done:]])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for special tokens and ids out of range."""
        if token_id in self._control_texts:
            hidden = token_id in self._hidden_ids
            return b"" if hidden else self._control_texts[token_id].encode()
        piece: str | None = self._model.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_character()
            return b"".join(table.get(c) or c.encode() for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_META_SPACE, " ").encode()

    def all_token_bytes(self) -> list[bytes]:
        """Return `token_bytes` of every id, from 0 on."""
        num_ids = max([self._model.get_vocab_size(), *(i + 1 for i in self._control_texts)])
        return [self.token_bytes(token_id) for token_id in range(num_ids)]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self)
        return detokenizer.push(ids) + detokenizer.finish()

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield (text before, control token) pairs; the last control token is empty."""
        done = 0
        for start, length in self._occurrences(text, partial=False):
            if start >= done:
                yield text[done:start], text[start : start + length]
                done = start + length
        yield text[done:], ""

    def _occurrences(self, text: str, *, partial: bool) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of control tokens; `partial`: also those that the end cuts off."""
        for start, first in enumerate(text):
            for length in self._lengths_by_first.get(first, ()):
                candidate = text[start : start + length]
                is_cut = len(candidate) < length
                if candidate in self._control_ids or (
                    partial and is_cut and self._is_prefix(candidate)
                ):
                    yield start, len(candidate)
                    break

    def _is_prefix(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._control_ids)


def _check_model(model: Any, path: Path) -> None:
    """Check the model's structure: the library's own errors do not name the file."""
    lists = {"Unigram": list}
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise CheckpointError(f"{path} has no tokenizer model that is known ({kind})")
    has_merges = kind != "BPE" or isinstance(model.get("merges"), list)
    if not has_merges or not isinstance(model.get("vocab"), lists.get(kind, dict)):
        raise CheckpointError(
            f"{path}: the vocabulary or the merges of its {kind} model are broken"
        )


def _checked_tokens(added: Any, path: Path) -> list[dict[str, Any]]:
    """Return the added tokens. Raises CheckpointError for one without a text or an id."""
    tokens: list[Any] = added if isinstance(added, list) else [None]
    for token in tokens:
        is_whole = (
            isinstance(token, dict)
            and isinstance(token.get("content"), str)
            and token["content"]
            and type(token.get("id")) is int
            and token["id"] >= 0
        )
        if not is_whole:
            raise CheckpointError(f"{path}: an added token needs a content and an id")
    return tokens


def _model_of(data: dict[str, Any], path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises no other kind
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _lengths_by_first(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    lengths: dict[str, set[int]] = {}
    for name in names:
        lengths.setdefault(name[0], set()).add(len(name))
    return {first: tuple(sorted(found, reverse=True)) for first, found in lengths.items()}


def _is_byte_level(decoder: Any, path: Path) -> bool:
    """Whether pieces are bytes in GPT-2's alphabet, not text with <0xNN> (sentence piece)."""
    parts = [decoder, *(decoder.get("decoders") or [])] if isinstance(decoder, dict) else []
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise CheckpointError(f"{path}: only byte-level and sentence-piece tokenizers are supported")


@cache
def _byte_of_character() -> dict[str, bytes]:
    """Map each printable character of GPT-2's byte-level alphabet to its byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): bytes([byte]) for index, byte in enumerate(others)})
    return table


class IncrementalDetokenizer:
    """Converter of one stream of token ids to text, which never splits a character."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = tokenizer.drops_first_space

    def push(self, ids: Iterable[int], *, is_last: bool = False) -> str:
        """Return the text that is complete with these ids.

        With the last ones an unfinished character is U+FFFD.
        """
        text = self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)), is_last)
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character, or nothing."""
        return self.push((), is_last=True)
