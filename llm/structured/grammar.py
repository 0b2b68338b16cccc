"""JSON schemas as grammars over a model's tokens (llguidance, which is imported on first use).

    GrammarCompiler ──compile(schema)──> GrammarMatcher ──advance(tokens), fill(words)──> mask

A matcher follows one request. It is fed real tokens only, each of them once; no tokens are ever
forced ahead of the model, because their keys and values would have no place in the step.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llm.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class TokenSpelling(Protocol):
    """Tokenizer functions that grammars need; otherwise the core only uses ids."""

    def all_token_bytes(self) -> Sequence[bytes]:
        """Return the bytes of each token id, from id 0 on; none for control tokens."""

    def encode(self, text: str, /) -> list[int]:
        """Return the ids of a text, which the model writes where a grammar forces that text."""


MAX_CACHED_GRAMMARS = 64
MAX_SCHEMA_CHARACTERS = 65_536
# White space that printers of JSON write between tokens: a blank, or a new line and its
# indentation. Unrestricted white space makes weak models repeat it without end.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t]|\r?\n[ \t]{0,32}"}
# Numbers must be greater than this one where they are values of these keywords, or inside of one.
LOWER_LIMIT = -(2.0**63)
LIMITED = ("const", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
NOTHING_FITS = "json_schema: no token of this model continues the document"


def check_json_schema(schema: str) -> None:
    """Raise `RequestError` unless a document can begin under the schema; needs no model."""
    matcher = _create_matcher(_byte_tokenizer(), schema)
    matcher.compute_bitmask()
    if matcher.is_error() or matcher.is_stopped():
        raise RequestError(
            "json_schema: no document fits it; a $ref must not lead back to itself alone"
        )


@cache
def _byte_tokenizer() -> LLTokenizer:
    """Return a vocabulary that can write every document."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _create_matcher(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _json_grammar(schema), log_level=0)
    if matcher.is_error():
        raise _broken(matcher)
    return matcher


def _json_grammar(schema: str) -> str:
    from llguidance import LLMatcher

    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise RequestError(f"json_schema is longer than {MAX_SCHEMA_CHARACTERS} characters")
    _refuse_small_numbers(schema)
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)
    except ValueError as error:
        raise RequestError(f"json_schema: {error}") from error
    return grammar


def _refuse_small_numbers(schema: str) -> None:
    """Raise `RequestError` when a value or a bound is -2⁶³ or less, as a double.

    An integer that can only be such a number makes the library (llguidance 1.9) call itself until
    the stack overflows, which ends the process. Text that is not JSON is left to the library.
    """
    try:
        found = _smallest(json.loads(schema, parse_int=float), is_limited=False)
    except (ValueError, RecursionError):
        return
    if found <= LOWER_LIMIT:
        raise RequestError(
            f"json_schema: {found:g} is too small; values and bounds must be greater than -2^63"
        )


def _smallest(part: object, *, is_limited: bool) -> float:
    """Return the smallest number inside of a keyword of `LIMITED`, or 0 when none is negative."""
    if isinstance(part, float):
        return min(part, 0.0) if is_limited else 0.0
    if isinstance(part, dict):
        found = (_smallest(v, is_limited=is_limited or k in LIMITED) for k, v in part.items())
    elif isinstance(part, list):
        found = (_smallest(v, is_limited=is_limited) for v in part)
    else:
        return 0.0
    return min(found, default=0.0)


class GrammarCompiler:
    """Creates matchers for one vocabulary and caches the latest grammars. Thread-safe."""

    def __init__(self, spelling: TokenSpelling, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._spelling = spelling
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, schema: str) -> GrammarMatcher:
        """Return a matcher at the schema's beginning. Raises `RequestError` for an invalid
        schema.
        """
        with self._lock:
            found = self._ready.get(schema)
            if found is None:
                found = self._ready[schema] = self._create(schema)
            self._ready.move_to_end(schema)
            if len(self._ready) > MAX_CACHED_GRAMMARS:
                self._ready.popitem(last=False)
        return GrammarMatcher(found.deep_copy(), self.vocab_size)

    def _create(self, schema: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = _create_tokenizer(self._spelling, self.vocab_size)
        return _create_matcher(self._tokenizer, schema)


def _create_tokenizer(spelling: TokenSpelling, vocab_size: int) -> LLTokenizer:
    """Create the vocabulary with one additional token for the end, which no model has."""
    from llguidance import LLTokenizer, TokenizerWrapper

    token_bytes = list(spelling.all_token_bytes()[:vocab_size])
    token_bytes += [b""] * (vocab_size + 1 - len(token_bytes))
    wrapper = TokenizerWrapper(_Vocabulary(spelling, token_bytes))
    return LLTokenizer(wrapper, n_vocab=len(token_bytes), eos_token=vocab_size)


class _Vocabulary:
    """The interface that llguidance expects of a tokenizer, with its names."""

    bos_token_id = None

    def __init__(self, spelling: TokenSpelling, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self._spelling = spelling
        self._ids = {spelled: token for token, spelled in enumerate(tokens) if spelled}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokenizer's ids if they spell exactly this text; else the longest matching
        ones.

        Sentence-piece tokenizers, for example, add a space in front.
        """
        try:
            ids = self._spelling.encode(text.decode())
        except (UnicodeDecodeError, RequestError):
            return self._greedy(text)
        spelled = b"".join(self.tokens[token] for token in ids)
        return ids if spelled == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids: list[int] = []
        done = 0
        while done < len(text):
            lengths = range(min(self._longest, len(text) - done), 0, -1)
            length = next((n for n in lengths if text[done : done + n] in self._ids), 0)
            if length == 0:
                break  # the vocabulary cannot write it; the mask will be empty
            ids.append(self._ids[text[done : done + length]])
            done += length
        return ids


class GrammarMatcher:
    """State of one request in its grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = np.zeros((vocab_size + 32) // 32, dtype=np.int32)  # with one bit for the end
        self.num_consumed = 0

    def advance(self, output_ids: Sequence[int], sampled: Sequence[int] = ()) -> None:
        """Follow a request's outputs and what was sampled after them; earlier ones are skipped."""
        new = list(output_ids[self.num_consumed :])
        new += sampled[max(0, self.num_consumed - len(output_ids)) :]
        if new and not self._matcher.consume_tokens(new):
            raise _broken(self._matcher)
        self.num_consumed += len(new)

    def fill(self, words: np.ndarray, stop_ids: Collection[int], may_stop: bool) -> None:
        """Write the tokens that may come next into int32 [⌈V/32⌉] words, lowest bit first.

        A stop id may come where the document is complete: when `may_stop`, or when no other token
        fits.
        """
        matcher, own = self._matcher, self._words
        own.fill(0)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if matcher.is_error():
            raise _broken(matcher)
        own[self._vocab_size // 32] &= ~np.int32(1 << (self._vocab_size % 32))
        words[:] = own[: len(words)]
        bits = words.view(np.uint32)
        for stop in stop_ids:
            bits[stop // 32] &= ~np.uint32(1 << (stop % 32))
        if matcher.is_accepting() and (may_stop or not bits.any()):
            for stop in stop_ids:
                bits[stop // 32] |= np.uint32(1 << (stop % 32))
        if not bits.any():
            raise RequestError(NOTHING_FITS)


def _broken(matcher: LLMatcher) -> RequestError:
    """Return an error with the first line of the library's message; the rest is its inner state."""
    if matcher.get_error().startswith("NoExtension"):
        return RequestError(NOTHING_FITS)
    return RequestError(f"json_schema: {matcher.get_error().splitlines()[0]}")
