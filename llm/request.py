"""Values that a caller passes to the engine and receives: frozen, with token ids only.

`RequestRules` and `check_switches` check requests against a model before they are queued.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, cast

from llm.delays import FrameDelays
from llm.errors import RequestError

IdRange = tuple[int, int]
Token = int | tuple[int, ...] | bytes
"""One position of a sequence: a token id; a frame, the codes of all K codebooks, and with
`FrameShape.text_size` the id of a text token that is read with them; or, in prompts of models with
`FrameShape.vector_size`, a vector: an embedding as little-endian float32."""


def as_ids(tokens: Sequence[Token]) -> Sequence[int]:
    """Return the tokens of a model without frames with their type: they are ids."""
    return cast("Sequence[int]", tokens)


def first_codes(tokens: Sequence[Token]) -> list[int]:
    """Return the first codes of generated frames; ids are returned as they are."""
    return [_first(token) for token in tokens]


VECTOR_WIDTH = 4  # bytes of a number of a vector
MAX_PRIORITY = 1000  # largest absolute value
NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence


class FinishReason(Enum):
    """Reason why a sequence ended."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"  # the caller cancelled the request
    ERROR = "error"  # the request failed; `TokenChunk.error` has the reason


@dataclass(frozen=True, slots=True)
class CodeSampling:
    """Parameters for drawing the codes of a frame after the first, see `SamplingParams`."""

    temperature: float = 1.0  # 0 = argmax
    top_k: int = 0  # 0 = off
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _check_draw(self)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling the next token. The defaults sample from the model's own
    distribution.

    `allowed_ranges` are half-open id ranges; outside of them only stop ids can be sampled (empty:
    no restriction). `allowed_cycle` gives the ranges by position instead: generated token n is
    restricted to ranges `n % len(allowed_cycle)`, and stop ids can be sampled only at the beginning
    of a cycle, so that a sequence that stops consists of whole cycles. `penalty_window` is the
    number of the latest *generated* tokens that the three penalties apply to (0: all). With a
    `json_schema` the output is one JSON document that matches it, ended by a stop id as soon as no
    other token is possible, also before `min_tokens`. (`max_tokens` may truncate it.) A model of
    frames draws the codes after the first with `later_codes` in place of `temperature`, `top_k` and
    `top_p`; None: with the same. Of a model with `FrameShape.text_size`, generated frame n has the
    text id `frame_texts[n]`, and `FrameShape.text_pad` behind the last of them.
    """

    temperature: float = 1.0  # 0 = argmax
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = 0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0  # stop ids cannot be sampled before this many tokens
    stop_token_ids: tuple[Token, ...] = ()
    ignore_eos: bool = False  # do not stop at stop ids (for benchmarks)
    allowed_ranges: tuple[IdRange, ...] = ()
    allowed_cycle: tuple[tuple[IdRange, ...], ...] = ()
    # None: no log-probabilities; n: those of the chosen token and of the n best
    top_logprobs: int | None = None
    json_schema: str = ""  # a JSON schema as text; empty = free output
    echo: bool = False  # also return log-probabilities of the prompt's tokens
    later_codes: CodeSampling | None = None
    # Long, and not compared: parameters are keys of caches that do not depend on them.
    frame_texts: tuple[int, ...] = field(default=(), compare=False)

    @property
    def all_ranges(self) -> tuple[IdRange, ...]:
        """Return all ranges that are allowed at some position; empty means no restriction."""
        return tuple(chain(self.allowed_ranges, *self.allowed_cycle))

    def __post_init__(self) -> None:
        _check_draw(self)
        checks = (
            (0 <= self.min_p < 1, "min_p must be in [0, 1)"),
            (
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "repetition_penalty must be > 0 (1 = off)",
            ),
            (math.isfinite(self.frequency_penalty), "frequency_penalty must be finite"),
            (math.isfinite(self.presence_penalty), "presence_penalty must be finite"),
            (self.penalty_window >= 0, "penalty_window must be ≥ 0 (0 = whole output)"),
            (0 <= self.seed < 2**64, "seed must be an unsigned 64-bit number"),
            (self.max_tokens >= 1, "max_tokens must be ≥ 1"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens must be in [0, max_tokens]"),
            (
                all(0 <= a < b for a, b in self.allowed_ranges),
                "allowed_ranges must be [start, end)",
            ),
            (
                all(r and all(0 <= a < b for a, b in r) for r in self.allowed_cycle),
                "allowed_cycle must hold [start, end) ranges for every position",
            ),
            (
                not (self.allowed_ranges and self.allowed_cycle),
                "give either allowed_ranges or allowed_cycle",
            ),
            (self.top_logprobs is None or self.top_logprobs >= 0, "top_logprobs must be ≥ 0"),
            (
                not self.json_schema or not (self.all_ranges or self.ignore_eos),
                "json_schema goes with neither allowed ranges nor ignore_eos",
            ),
            (not self.echo or self.top_logprobs is not None, "echo needs top_logprobs (0 or more)"),
        )
        for holds, message in checks:
            if not holds:
                raise RequestError(message)


def _check_draw(params: SamplingParams | CodeSampling) -> None:
    """Raise `RequestError` for parameters that no distribution has."""
    temperature = params.temperature
    checks = (
        (math.isfinite(temperature) and temperature >= 0, "temperature must be ≥ 0"),
        (params.top_k >= 0, "top_k must be ≥ 0 (0 = off)"),
        (0 < params.top_p <= 1, "top_p must be in (0, 1]"),
    )
    for holds, message in checks:
        if not holds:
            raise RequestError(message)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    `request_id` is unique among the engine's live requests. Requests with different values of
    `cache_salt` (tenants, adapters) do not share cached prefixes.
    """

    request_id: str
    prompt_ids: tuple[Token, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher values run first
    cache_salt: str = ""
    embeds: bool = False  # return vectors of the prompt, and no tokens
    lora: str = ""  # name of the adapter; empty = the base model

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("request_id must not be empty")
        if not self.prompt_ids:
            raise RequestError("the prompt must hold at least one token")

    @property
    def cache_namespace(self) -> str:
        """Namespace of the prefix cache; the keys and values of an adapter are separate."""
        return f"{self.lora}\0{self.cache_salt}" if self.lora else self.cache_salt


class TokenLogprob(NamedTuple):
    """A token's log-probability under the raw logits, and the best alternatives.

    The first token of a prompt has neither.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


# Named tuples for values created per row and step: a frozen dataclass takes four times as long.


class TokenChunk(NamedTuple):
    """Tokens of one request that one step produced; each token is delivered once.

    Only the last chunk of a request has a `finish_reason`; it may hold no tokens. A stop id is
    never among `token_ids`. With `echo`, every token of the prompt has one entry in
    `prompt_logprobs`, in order, before the first token or together with it.
    """

    request_id: str
    token_ids: tuple[Token, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens taken from the prefix cache
    output_tokens: int = 0  # generated tokens so far, with those of this chunk
    queue_s: float | None = None  # from submission until the request was first scheduled
    prefill_s: float | None = None  # from first scheduled to first token
    total_s: float = 0.0  # since submission
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embeddings: tuple[bytes, ...] = ()  # little-endian float32 vectors: one, or one for each token
    is_refused: bool = False  # the request itself is at fault: no document can match its schema


class TokenBuffer:
    """Tokens of one request that no chunk has yet, so that a chunk has `limit` of them or more.

    The chunk with the first token does not wait, nor does the last one; others may come early, too,
    with all tokens so far. For a reader that needs no token before others: most of a step's time
    of the host for a row is that of its chunk. Once the request has been submitted, it is used on
    the engine's thread only.
    """

    __slots__ = ("ids", "limit")

    def __init__(self, limit: float = 1) -> None:
        self.ids: list[Token] = []
        self.limit = limit

    def take(self) -> tuple[Token, ...]:
        """Remove and return the tokens."""
        taken = tuple(self.ids)
        self.ids.clear()
        return taken


def check_switches(request: Request, *, penalties: bool, min_tokens: bool) -> None:
    """Raise `RequestError` when a request needs a feature that is switched off."""
    sampling = request.sampling
    asked = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if asked != NO_PENALTIES and not penalties:
        raise RequestError("penalties are switched off here (sampling.enable_penalties)")
    if sampling.min_tokens and not min_tokens:
        raise RequestError("minimum lengths are switched off here (sampling.enable_min_tokens)")


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Tokens of a model of frames: text ids in prompts, and frames of K codes.

    With `text_size` a frame is K codes and a text id below `text_size`, which no model generates:
    it is the request's, see `SamplingParams.frame_texts`, or `text_pad`.

    `codebook_size` is that of the first codebook. `later_size` is that of the others, which are not
    larger; 0: the same. Vectors in prompts have `vector_size` numbers; 0: there are none. Raises
    `ValueError` for delays that do not fit the codebooks.
    """

    num_codebooks: int
    codebook_size: int
    num_text_ids: int
    end: tuple[int, ...]  # the frame that ends a sequence
    later_size: int = 0
    ends_at_first_code: bool = False  # whatever the other codes are, which `end` has as zeros
    vector_size: int = 0
    delays: FrameDelays | None = None  # None: a position has the codes of one audio frame
    text_size: int = 0  # 0: frames have no text id
    text_pad: int = 0

    @property
    def num_ids(self) -> int:
        """Number of ids of a frame: its codes, and its text id."""
        return self.num_codebooks + (self.text_size > 0)

    def __post_init__(self) -> None:
        delays = self.delays
        if delays is None:
            return
        if len(delays.table) != self.num_codebooks or {*self.end} != {delays.end}:
            raise ValueError(
                f"{self.num_codebooks} codebooks that end with {self.end} have delays "
                f"{delays.table} that end with {delays.end}"
            )

    def has(self, token: Token) -> bool:
        """Whether a prompt may contain the token."""
        if isinstance(token, int):
            return 0 <= token < self.num_text_ids
        if isinstance(token, bytes):
            is_whole = len(token) == VECTOR_WIDTH * self.vector_size > 0
            return is_whole and all(map(math.isfinite, memoryview(token).cast("f")))
        return self.has_frame(token)

    def has_frame(self, token: Token) -> bool:
        """Whether the token is a frame of this shape."""
        if isinstance(token, int | bytes) or len(token) != self.num_ids:
            return False
        largest = max(token[1 : self.num_codebooks], default=0)
        is_known = min(token) >= 0 and token[0] < self.codebook_size
        if self.text_size and token[-1] >= self.text_size:
            return False
        return is_known and largest < (self.later_size or self.codebook_size)


def paired_token(text_id: int, code: int, text_vocab_size: int) -> int:
    """Return the token of a position whose input is a text id plus a code of the first codebook.

    For models whose `FrameShape.num_text_ids` has room for the pairs: Qwen3-TTS.
    """
    return text_id + (code + 1) * text_vocab_size


@dataclass(frozen=True, slots=True)
class RequestRules:
    """The model's vocabulary, maximum length and stop ids. `frames` None: all tokens are ids.

    `media_ids` stand for images and videos, which are not read.
    """

    vocab_size: int
    max_length: int  # prompt and generated tokens
    eos_token_ids: frozenset[Token]
    frames: FrameShape | None = None
    media_ids: frozenset[int] = frozenset()

    def apply(self, request: Request) -> Request:
        """Return the request with the model's stop ids added to its own. Raises `RequestError`."""
        self._check(request)
        sampling = request.sampling
        stops, ranges = sampling.stop_token_ids, sampling.all_ranges
        # Stop ids bypass the allowed ranges; one that the caller has excluded must stay excluded.
        added = sorted(
            token
            for token in self.eos_token_ids.difference(stops)
            if not ranges or any(start <= _first(token) < end for start, end in ranges)
        )
        if not added:
            return request
        sampling = dataclasses.replace(sampling, stop_token_ids=(*stops, *added))
        return dataclasses.replace(request, sampling=sampling)

    def _check(self, request: Request) -> None:
        ids, sampling, size = request.prompt_ids, request.sampling, self.vocab_size
        ends = [end for _, end in sampling.all_ranges]
        longest = self.max_length - 1
        checks = (
            (len(ids) <= longest, f"the prompt has {len(ids)} tokens; at most {longest} fit"),
            (
                len(ids) + sampling.min_tokens <= self.max_length,
                f"the prompt has {len(ids)} tokens and min_tokens is {sampling.min_tokens}; "
                f"together at most {self.max_length} fit",
            ),
            self._check_ids("prompt", ids),
            self._check_ids("stop", sampling.stop_token_ids),
            (max(ends, default=0) <= size, f"allowed ranges go beyond the vocabulary of {size}"),
            (
                (sampling.top_logprobs or 0) <= size,
                f"top_logprobs exceeds the vocabulary of {size}",
            ),
            (abs(request.priority) <= MAX_PRIORITY, f"priority must be within ±{MAX_PRIORITY}"),
            (
                not self.media_ids or self.media_ids.isdisjoint(ids),
                "the prompt has an image or a video; the model reads text alone here",
            ),
            (
                self.frames is not None or sampling.later_codes is None,
                "later_codes is for models of frames",
            ),
            self._check_texts(sampling.frame_texts),
        )
        for holds, message in checks:
            if not holds:
                raise RequestError(message)

    def _check_texts(self, texts: tuple[int, ...]) -> tuple[bool, str]:
        """Return whether frames can have these text ids, and the error that they cannot."""
        size = self.frames.text_size if self.frames else 0
        if not size:
            return not texts, "frame_texts is for models whose frames have a text id"
        is_valid = not texts or (min(texts) >= 0 and max(texts) < size)
        return is_valid, f"frame_texts must be text ids below {size}"

    def _check_ids(self, kind: str, tokens: tuple[Token, ...]) -> tuple[bool, str]:
        """Return whether all tokens are the model's, and the error that they are not."""
        frames = self.frames
        if frames is None:
            is_valid = {*map(type, tokens)} <= {int}
            if is_valid and tokens:
                ids = as_ids(tokens)
                is_valid = min(ids) >= 0 and max(ids) < self.vocab_size
            return is_valid, f"a {kind} id is not in the vocabulary of {self.vocab_size}"
        is_known = frames.has_frame if kind == "stop" else frames.has
        wrong = next((place for place, token in enumerate(tokens) if not is_known(token)), None)
        count, size = frames.num_codebooks, str(frames.codebook_size)
        if frames.later_size:
            size += f", from the second on below {frames.later_size}"
        if frames.text_size:
            size += f", and a text id below {frames.text_size}"
        text = "" if kind == "stop" else f"a text id below {frames.num_text_ids} or "
        if text and frames.vector_size:
            size += f", or a vector of {frames.vector_size} finite numbers"
        return wrong is None, f"{kind} token {wrong} is not {text}{count} codes below {size}"


def _first(token: Token) -> int:
    return token if isinstance(token, int) else token[0]
