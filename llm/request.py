"""What a caller gives to the engine and gets back: frozen values, token ids only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

from llm.errors import RequestError

IdRange = tuple[int, int]


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"  # a stop id was sampled
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"  # the caller cancelled it
    ERROR = "error"  # it failed; `TokenChunk.error` says why


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The defaults sample from the model's own distribution.

    `allowed_ranges` are half-open id ranges outside of which nothing but a stop id can be
    sampled (empty: everything is allowed). `allowed_cycle` gives them for each position instead:
    generated token n is held to ranges `n % len(allowed_cycle)`, and stop ids can be sampled
    only where a cycle begins, so that a sequence which stops is whole cycles. `penalty_window`
    is how many of the latest *generated* tokens the three penalties look at (0: all of them).
    With a `json_schema` the output is one JSON document that fits it, ended by a stop id: as soon
    as nothing else can follow, also before `min_tokens`. (`max_tokens` may cut it off.)
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
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # keep going past stop ids (benchmarks)
    allowed_ranges: tuple[IdRange, ...] = ()
    allowed_cycle: tuple[tuple[IdRange, ...], ...] = ()
    top_logprobs: int | None = None  # None: no log-probabilities; n: the chosen and n best
    json_schema: str = ""  # a JSON schema as text; empty = free output
    echo: bool = False  # log-probabilities of the prompt's tokens, too

    @property
    def all_ranges(self) -> tuple[IdRange, ...]:
        """Every range that is allowed somewhere; none means that everything is."""
        return tuple(chain(self.allowed_ranges, *self.allowed_cycle))

    def __post_init__(self) -> None:
        checks = (
            (math.isfinite(self.temperature) and self.temperature >= 0, "temperature must be ≥ 0"),
            (self.top_k >= 0, "top_k must be ≥ 0 (0 = off)"),
            (0 < self.top_p <= 1, "top_p must be in (0, 1]"),
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
            (_are_ranges(self.allowed_ranges), "allowed_ranges must be [start, end)"),
            (
                all(ranges and _are_ranges(ranges) for ranges in self.allowed_cycle),
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


def _are_ranges(ranges: tuple[IdRange, ...]) -> bool:
    return all(0 <= start < end for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to continue.

    `request_id` is unique among the engine's live requests. `cache_salt` keeps the prefix cache
    of one tenant or adapter apart from another's.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # higher runs first
    cache_salt: str = ""
    embeds: bool = False  # the vectors of the prompt are wanted, and no tokens
    lora: str = ""  # name of the adapter; empty = the base model

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("request_id must not be empty")
        if not self.prompt_ids:
            raise RequestError("the prompt must hold at least one token")

    @property
    def cache_namespace(self) -> str:
        """Whose prefixes it may share: an adapter's keys and values are nobody else's."""
        return f"{self.lora}\0{self.cache_salt}" if self.lora else self.cache_salt


class TokenLogprob(NamedTuple):
    """A token's log-probability under the raw logits, and the best alternatives'.

    A prompt's first token has neither: nothing predicts it.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


# Named tuples where every row of every step makes one: a frozen dataclass costs four times as much.


class RequestTimings(NamedTuple):
    """Seconds since the request was submitted; None while it has not happened."""

    queue_s: float | None = None  # until it was first scheduled
    prefill_s: float | None = None  # from first scheduled to first token
    total_s: float = 0.0


class TokenChunk(NamedTuple):
    """Tokens of one request that became known in one step; each token is delivered once.

    The last chunk of a request, and only it, has a `finish_reason`; it may hold no tokens.
    A stop id is never among `token_ids`. With `echo`, every token of the prompt has its entry in
    `prompt_logprobs` once, in order, before the first token or together with it.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of them taken from the prefix cache
    output_tokens: int = 0  # generated so far, this chunk included
    queue_s: float | None = None  # see `timings`
    prefill_s: float | None = None
    total_s: float = 0.0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embeddings: tuple[bytes, ...] = ()  # little-endian float32 vectors: one, or one for each token
    is_refused: bool = False  # it failed by what it asks for: no document can fit its schema

    @property
    def timings(self) -> RequestTimings:
        """How long the request has taken so far."""
        return RequestTimings(self.queue_s, self.prefill_s, self.total_s)
