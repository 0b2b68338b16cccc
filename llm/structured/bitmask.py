"""`StructuredOutput`: the grammar matchers of live requests, and the bitmask of a step's rows.

    prepare sampling:  mask(rows, tokens sampled in this turn) ──> TokenMask ──> Sampler
    end of request:    release(request_id)

Only the mask constrains the model: no tokens are inserted. A mask needs every token before
it on the host, so a caller that runs a step ahead of its results must wait for the rows that
`needs_tokens` names before it samples; the forward may still overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from llm.batch import ScheduledRow
from llm.errors import RequestError
from llm.memory.transfer import to_device
from llm.request import Request, as_ids
from llm.sampling.logits import TokenMask
from llm.structured.grammar import GrammarCompiler, GrammarMatcher, TokenSpelling


@dataclass(frozen=True, slots=True)
class StepMask:
    """Mask of the constrained rows (None: there are none), and requests whose grammar failed."""

    tokens: TokenMask | None = None
    failures: Mapping[str, str] = field(default_factory=dict)  # error by request id


FREE = StepMask()


class StructuredOutput:
    """Grammars for a model of `vocab_size` on `device`.

    `tokenizer` None means that the tokens cannot be spelled: then no request can have a schema, nor
    while it is not `enabled` (`sampling.enable_structured_output`).
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        tokenizer: TokenSpelling | None = None,
        *,
        enabled: bool = False,
    ) -> None:
        if enabled and tokenizer is None:
            raise ValueError("enable_structured_output needs the model's tokenizer")
        self.vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._compiler = GrammarCompiler(tokenizer, vocab_size) if tokenizer else None
        self._enabled = enabled
        self._matchers: dict[str, GrammarMatcher] = {}

    @property
    def num_matchers(self) -> int:
        """Number of requests with a grammar."""
        return len(self._matchers)

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for a request whose schema is not supported. Thread-safe."""
        if request.sampling.json_schema:
            if not request.sampling.stop_token_ids:
                raise RequestError("json_schema needs a stop id: nothing else ends the document")
            self._compile(request.sampling.json_schema)

    def _compile(self, schema: str) -> GrammarMatcher:
        if self._compiler is None or not self._enabled:
            raise RequestError("json_schema needs sampling.enable_structured_output")
        return self._compiler.compile(schema)

    def release(self, request_id: str) -> None:
        """Free the grammar of a request; no effect for unknown ids."""
        self._matchers.pop(request_id, None)

    def mask(
        self, rows: Sequence[ScheduledRow], sampled: Sequence[Sequence[int]] | None = None
    ) -> StepMask:
        """Return the mask for `sampled` tokens (by row) after the rows' `output_ids`.

        A row whose grammar fails is not constrained, and is listed in the failures.
        """
        places = [place for place, row in enumerate(rows) if needs_tokens(row)]
        if not places:
            return FREE
        words = np.full((len(places), self._num_words), -1, dtype=np.int32)
        failures: dict[str, str] = {}
        for own, place in zip(words, places, strict=True):
            try:
                self._fill(own, rows[place], sampled[place] if sampled else ())
            except RequestError as error:
                own.fill(-1)
                failures[rows[place].request_id] = str(error)
        index = to_device(torch.tensor(places), self._device)
        mask = TokenMask(index, to_device(torch.from_numpy(words), self._device))
        return StepMask(mask, failures)

    def _fill(self, words: np.ndarray, row: ScheduledRow, sampled: Sequence[int]) -> None:
        stop_ids = as_ids(row.sampling.stop_token_ids)
        if not set(stop_ids).isdisjoint(sampled):
            return  # the sequence has ended within its multi-step turn: its samples are discarded
        matcher = self._matchers.get(row.request_id)
        if matcher is None:
            matcher = self._compile(row.sampling.json_schema)
            self._matchers[row.request_id] = matcher
        matcher.advance(as_ids(row.output_ids), sampled)
        matcher.fill(words, stop_ids, matcher.num_consumed >= row.sampling.min_tokens)

    def initialize_bitmask(self, rows: Sequence[ScheduledRow]) -> np.ndarray | None:
        """Return int32 [B, V] of ones, one row for each of `rows`; None when none has a schema."""
        if not any(map(needs_tokens, rows)):
            return None
        return np.ones((len(rows), self.vocab_size), dtype=np.int32)

    def update_for_structured_output(
        self, row: ScheduledRow, bitmask: np.ndarray, index: int
    ) -> None:
        """Set row `index` of an `initialize_bitmask` to the tokens that the request may sample
        next.

        The schema is compiled at the first call. Raises `ValueError` for an invalid schema, or
        while structured output is off.
        """
        if not needs_tokens(row):
            return
        words = np.full(self._num_words, -1, dtype=np.int32)
        self._fill(words, row, ())
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bitmask[index] = bits[: self.vocab_size]


def needs_tokens(row: ScheduledRow) -> bool:
    """Whether the row cannot be sampled before all its earlier tokens are known."""
    return bool(row.sampling.json_schema)
