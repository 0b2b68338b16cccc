"""JSON schemas as grammars over a model's tokens (llguidance, which is imported on first use).

    GrammarCompiler ──compile(schema)──> GrammarMatcher ──advance(tokens), fill(words)──> mask

A matcher follows one request. It sees real tokens only, and each of them once; no tokens are ever
forced ahead of the model, because their keys and values would have no place in the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llm.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TokenBytes = Callable[[], Sequence[bytes]]
"""The bytes each token id stands for, from id 0 on; none for control tokens."""

MAX_CACHED_GRAMMARS = 64
MAX_SCHEMA_CHARACTERS = 65_536
# White space is free between JSON's own signs, but a model must not get lost in it.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


class GrammarError(Exception):
    """A grammar cannot go on for one request (too complex, or no token of the model fits)."""


def check_json_schema(schema: str) -> None:
    """Raise `RequestError` unless a grammar can be made from the schema; no model is needed."""
    from llguidance import LLMatcher

    found = LLMatcher.validate_grammar(_json_grammar(schema), None)
    if found and not found.startswith("WARNING"):
        raise RequestError(f"json_schema: {found}")


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise RequestError(f"json_schema is longer than {MAX_SCHEMA_CHARACTERS} characters")
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    except ValueError as error:
        raise RequestError(f"json_schema: {error}") from error
    return grammar


class GrammarCompiler:
    """Makes matchers for one vocabulary and keeps the grammars used last. Thread-safe."""

    def __init__(self, token_bytes: TokenBytes, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, schema: str) -> GrammarMatcher:
        """A matcher at the schema's beginning. Raises `RequestError` for a schema without one."""
        with self._lock:
            found = self._ready.get(schema)
            if found is None:
                found = self._ready[schema] = self._create(schema)
            self._ready.move_to_end(schema)
            if len(self._ready) > MAX_CACHED_GRAMMARS:
                self._ready.popitem(last=False)
        return GrammarMatcher(found.deep_copy(), self.vocab_size)

    def _create(self, schema: str) -> LLMatcher:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = _create_tokenizer(self._token_bytes(), self.vocab_size)
        matcher = LLMatcher(self._tokenizer, _json_grammar(schema), log_level=0)
        if matcher.is_error():
            raise RequestError(f"json_schema: {matcher.get_error()}")
        return matcher


def _create_tokenizer(token_bytes: Sequence[bytes], vocab_size: int) -> LLTokenizer:
    """The vocabulary and one token more, which no model has: it stands for the end."""
    from llguidance import LLTokenizer, TokenizerWrapper

    spelled = list(token_bytes[:vocab_size])
    spelled += [b""] * (vocab_size - len(spelled))
    wrapper = TokenizerWrapper(_Vocabulary([*spelled, b""]))
    return LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size, slices=None)


class _Vocabulary:
    """What llguidance asks a tokenizer for. It encodes nothing here, tokens are only matched."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return []


class GrammarMatcher:
    """Where one request is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros((vocab_size + 32) // 32, dtype=np.int32)  # one bit for the end, too
        self.num_consumed = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the tokens of a request from its first output on; those seen are skipped."""
        new = list(token_ids[self.num_consumed :])
        if new and not self._matcher.consume_tokens(new):
            raise GrammarError(f"json_schema: {self._matcher.get_error()}")
        self.num_consumed += len(new)

    def fill(self, words: np.ndarray, stop_ids: Collection[int], may_stop: bool) -> None:
        """Write the tokens that may come next into int32 [⌈V/32⌉] words, lowest bit first.

        A stop id may come where the document is complete: once `may_stop`, or when nothing else
        fits any more.
        """
        matcher, own = self._matcher, self._words
        own.fill(0)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if matcher.is_error():
            raise GrammarError(f"json_schema: {matcher.get_error()}")
        own[self._vocab_size // 32] &= ~np.int32(1 << (self._vocab_size % 32))
        words[:] = own[: len(words)]
        bits = words.view(np.uint32)
        for stop in stop_ids:
            bits[stop // 32] &= ~np.uint32(1 << (stop % 32))
        if matcher.is_accepting() and (may_stop or not bits.any()):
            for stop in stop_ids:
                bits[stop // 32] |= np.uint32(1 << (stop % 32))
        if not bits.any():
            raise GrammarError("json_schema: no token of this model goes on with the document")
