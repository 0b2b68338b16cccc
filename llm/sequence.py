"""`Sequence`: the state of one request: its tokens, lengths, page table and status.

    tokens      p p p p p p p p o o o o      p = prompt, o = generated
    processed ──────────^                    their KV is in the cache
    active_end ───────────────^              fed in the running step (equal to processed between)
    end ────────────────────────────^        all tokens known

A step feeds tokens [processed, active_end). The token sampled last has no KV yet.

A step that is planned while the previous one still runs feeds a token that is not known on the
host yet. Until its value arrives, the placeholder `FUTURE_TOKEN` is the last token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from llm.request import FinishReason, Request, Token, TokenBuffer, TokenChunk, TokenLogprob

FUTURE_TOKEN = -1  # placeholder for a token that is being sampled on the device
AWAITED = (FUTURE_TOKEN,)  # tokens of most rows of a batch planned ahead: one shared object


class SequenceStatus(Enum):
    """State of a sequence in the scheduler."""

    PENDING = "pending"  # has prompt tokens (or tokens to recompute) without KV
    PREFILLING = "prefilling"  # has prompt tokens (or tokens to recompute) without KV
    DECODING = "decoding"  # one token per step
    ENDING = "ending"  # its last token is being sampled; there is nothing left to schedule
    PAUSED = "paused"  # not scheduled; keeps its pages unless they are needed
    FINISHED = "finished"


_DECODING = SequenceStatus.DECODING  # looked up once rather than for every row of every step
_new = tuple.__new__  # creates a named tuple in half the time of its class


@dataclass(slots=True)
class ReceivedPrompt:
    """A prompt whose pages other engines have written, for `Engine.submit`.

    `name` is that of the claim with its pages, of which `num_pages` were written; `num_tokens` of
    the prompt have their KV. `token` is the first generated one, whose caller has it already, if it
    was sampled elsewhere; then the whole prompt has its KV.
    """

    name: str
    num_pages: int
    num_tokens: int
    token: Token | None = None
    is_taken: bool = False
    """Whether an engine has accepted the request, which has the claim from then on."""


TakenTokens = tuple[list[TokenChunk], SequenceABC[int], list[tuple[float | None, int]]]
"""Chunks of a step, the indices of the sequences that are left, and of the others (time, number) of
the tokens before, equal times in a row merged."""


class Sequence:
    """The only mutable object of a request, owned by the scheduler."""

    __slots__ = (
        "active_end",
        "arrival_s",
        "buffer",
        "cached_prompt_tokens",
        "cancel_asked_s",
        "cancel_requested",
        "entry_order",
        "extend_end",
        "first_scheduled_s",
        "in_flight",
        "is_plain",
        "kept_as",
        "last_processed",
        "lora",
        "max_outputs",
        "next_commit",
        "num_echoed",
        "num_preemptions",
        "on_launched",
        "output_ids",
        "pages",
        "pause_requested",
        "prefill_s",
        "processed",
        "prompt_len",
        "queue_s",
        "received",
        "request",
        "request_id",
        "sampling",
        "status",
        "stop_ids",
        "token_s",
        "tokens",
    )

    def __init__(self, request: Request, arrival_s: float = 0.0) -> None:
        self.request = request
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.lora = request.lora
        sampling = request.sampling
        has_more = request.lora or request.embeds or sampling.json_schema
        self.is_plain = sampling.top_logprobs is None and not has_more
        """Whether it only requests tokens of the base model, without restrictions."""
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.tokens: list[Token] = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)  # as submitted: preemption does not change it
        self.output_ids: list[Token] = []
        self.limit_length(sys.maxsize)
        self.processed = 0
        self.active_end = 0
        self.extend_end = self.prompt_len  # tokens to be extended before decoding continues
        self.pages: SequenceABC[int] = ()
        self.received: ReceivedPrompt | None = None  # until the scheduler has it
        self.kept_as = ""  # name of the claim with the pages after the end; empty: they are freed
        self.buffer: TokenBuffer | None = None  # of generated tokens that wait for others
        # called with its pages when the step that completes its prompt is launched
        self.on_launched: Callable[[SequenceABC[int]], None] | None = None
        self.next_commit = 0  # number of tokens with KV that completes the next page
        self.status = SequenceStatus.PENDING
        self.in_flight = 0  # steps that contain it and were neither committed nor failed
        self.cancel_requested = False
        self.cancel_asked_s: float | None = None
        self.pause_requested = False
        self.entry_order: int | None = None  # position among decoding sequences; set once
        self.num_preemptions = 0
        self.num_echoed = 0  # prompt tokens whose log-probabilities were delivered
        self.cached_prompt_tokens = 0
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.queue_s: float | None = None
        self.prefill_s: float | None = None
        self.token_s: float | None = None  # time of the last token

    @property
    def end(self) -> int:
        """Number of known tokens: prompt and generated."""
        return len(self.tokens)

    @property
    def needs_extend(self) -> bool:
        """Whether more than the last token lacks KV, or no token was sampled yet."""
        return self.processed < self.extend_end

    @property
    def remaining_tokens(self) -> int:
        """Tokens that `max_tokens` still allows."""
        return self.sampling.max_tokens - len(self.output_ids)

    def bind(self, pages: SequenceABC[int], num_cached: int) -> None:
        """Take a page table whose first `num_cached` tokens have KV already."""
        self.pages = pages
        self.processed = self.active_end = num_cached
        if self.num_preemptions == 0:
            self.cached_prompt_tokens = num_cached

    def receive(self, pages: SequenceABC[int], received: ReceivedPrompt) -> FinishReason | None:
        """Take pages that other engines have written, and the first token if it is known.

        Returns the reason if that token is the last.
        """
        self.bind(pages, received.num_tokens)
        if received.token is None:
            return None
        return self.accept(received.token)

    def activate(self, num_tokens: int) -> None:
        """Mark the next `num_tokens` as fed by the coming step."""
        self.active_end = self.processed + num_tokens
        self.in_flight += 1
        if not self.processed < self.active_end <= len(self.tokens):
            raise ValueError(f"{self!r} cannot feed {num_tokens} tokens")

    def launch(self, samples: bool) -> None:
        """Mark the step as started, so that the next one can be planned as if it had ended.

        Raises `ValueError` when an earlier step's token is still awaited.
        """
        if samples and self.awaits_token:
            raise ValueError(f"{self!r} already awaits a token")
        self.processed = self.active_end
        if samples:
            self.tokens.append(FUTURE_TOKEN)
            self.output_ids.append(FUTURE_TOKEN)

    @property
    def is_active(self) -> bool:
        """Whether it feeds tokens in a step that is not launched yet."""
        return self.processed < self.active_end

    @property
    def awaits_token(self) -> bool:
        """Whether a placeholder stands for the last token."""
        return bool(self.output_ids) and self.output_ids[-1] == FUTURE_TOKEN

    @property
    def is_ending(self) -> bool:
        """Whether its last token is known or awaited, or its vectors are."""
        if self.request.embeds:
            return not self.needs_extend
        return len(self.output_ids) >= self.max_outputs

    def complete_launch(self) -> None:
        """Remove the placeholder of a launched step that has ended."""
        self.in_flight -= 1
        self.drop_future()

    def drop_future(self) -> None:
        """Remove the placeholder."""
        if self.awaits_token:
            self.tokens.pop()
            self.output_ids.pop()

    def advance(self) -> None:
        """Mark the fed tokens as having KV."""
        self.processed = self.active_end
        self.in_flight -= 1

    def accept(self, token: Token) -> FinishReason | None:
        """Add a sampled token; its KV is computed when it is fed. Returns the reason if it is the
        last.

        STOP: the token is a stop id and was not added.
        """
        outputs = self.output_ids
        if token in self.stop_ids and self._can_stop:
            return FinishReason.STOP
        self.tokens.append(token)
        outputs.append(token)
        return FinishReason.LENGTH if len(outputs) >= self.max_outputs else None

    def chunk(
        self,
        now: float,
        token_ids: tuple[Token, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> TokenChunk:
        """Return the chunk of these tokens, which are part of the output already, and of those
        that waited.
        """
        if self.buffer is not None and self.buffer.ids:
            token_ids = self.buffer.take() + token_ids
        chunk = (  # the fields of `TokenChunk` in order: naming them takes twice as long
            self.request_id,
            token_ids,
            logprobs,
            None,  # finish_reason
            "",  # error
            self.prompt_len,
            self.cached_prompt_tokens,
            len(self.output_ids),
            self.queue_s,
            self.prefill_s,
            now - self.arrival_s,
            (),  # prompt_logprobs
            (),  # embeddings
            False,  # is_refused
        )
        return _new(TokenChunk, chunk)

    @property
    def _can_stop(self) -> bool:
        sampling = self.sampling
        if sampling.json_schema:
            return True  # only allowed where the document ends
        return not sampling.ignore_eos and len(self.output_ids) >= sampling.min_tokens

    def rewind(self) -> None:
        """Undo `activate` for an unfinished step."""
        self.active_end = self.processed
        self.in_flight -= 1

    def preempt(self) -> None:
        """Drop the pages: all known tokens have to be extended again; output and counts are
        kept.
        """
        self.processed = self.active_end = 0
        self.extend_end = len(self.tokens)
        self.pages = ()
        self.next_commit = 0
        self.num_preemptions += 1

    def limit_length(self, max_length: int) -> None:
        """Limit the sequence to `max_length` tokens in all, and to its own number of outputs."""
        self.max_outputs = min(self.sampling.max_tokens, max_length - self.prompt_len)
        # Number of tokens with KV when the last token is sampled, which itself has none.
        self.last_processed = self.prompt_len + self.max_outputs - 1

    def mark_scheduled(self, now: float) -> None:
        """Record when the prompt was first scheduled."""
        if self.first_scheduled_s is None:
            self.first_scheduled_s = now
            self.queue_s = now - self.arrival_s

    def mark_first_token(self, now: float) -> None:
        """Record how long the prompt took."""
        if self.first_scheduled_s is not None:
            self.prefill_s = now - self.first_scheduled_s

    def take_echo(self, entries: tuple[TokenLogprob, ...], start: int) -> tuple[TokenLogprob, ...]:
        """Return those entries for the tokens from `start` on that were not delivered yet.

        A preempted sequence computes its prompt again, and its generated tokens with it.
        """
        new = entries[max(0, self.num_echoed - start) : max(0, self.prompt_len - start)]
        self.num_echoed += len(new)
        return new

    def check_integrity(self, page_size: int) -> None:
        """Raise `AssertionError` unless the indices and the page table are consistent."""
        if not 0 <= self.processed <= self.active_end <= self.end:
            raise AssertionError(f"{self!r}: indices out of order")
        if self.active_end > len(self.pages) * page_size:
            raise AssertionError(f"{self!r}: too few pages")
        if self.end != self.prompt_len + len(self.output_ids):
            raise AssertionError(f"{self!r}: tokens and outputs disagree")
        if self.processed < self.active_end and not self.in_flight:
            raise AssertionError(f"{self!r}: active tokens, but in no step")
        if FUTURE_TOKEN in self.tokens[:-1] or (self.awaits_token and not self.in_flight):
            raise AssertionError(f"{self!r}: awaits a token that no step samples")
        if not self.in_flight and not self.needs_extend and self.processed != self.end - 1:
            raise AssertionError(f"{self!r}: a decoding sequence feeds exactly its last token")

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id} {self.status.value}, processed {self.processed} ≤ "
            f"active {self.active_end} ≤ end {self.end}, {len(self.output_ids)} generated, "
            f"{len(self.pages)} pages)"
        )


def take_tokens(
    sequences: SequenceABC[Sequence],
    sampled: Mapping[str, tuple[Token, ...]],
    now: float,
) -> TakenTokens:
    """Commit a step that was not launched for sequences in the common case: decoding, not ended.

    A step of several forwards has fed all of its tokens but the last. Tokens that wait for others
    have no chunk. The sequences that are left are unchanged, and need `advance` and `accept`: end,
    full page, move.
    """
    chunks: list[TokenChunk] = []
    left: list[int] = []
    before: list[float | None] = []
    for place, sequence in enumerate(sequences):  # runs for all rows of all steps
        tokens = sampled.get(sequence.request_id, ())
        processed = sequence.active_end + len(tokens) - 1
        if (
            not tokens
            or not sequence.stop_ids.isdisjoint(tokens)
            or processed >= sequence.next_commit
            or processed >= sequence.last_processed
            or sequence.status is not _DECODING
            or sequence.cancel_requested
            or sequence.pause_requested
        ):
            left.append(place)
            continue
        before.append(sequence.token_s)
        sequence.in_flight, sequence.token_s = sequence.in_flight - 1, now
        sequence.processed = sequence.active_end = processed
        sequence.tokens += tokens
        sequence.output_ids += tokens
        buffer = sequence.buffer
        if buffer is None:
            chunks.append(sequence.chunk(now, tokens))
            continue
        buffer.ids += tokens
        if len(buffer.ids) >= buffer.limit:
            chunks.append(sequence.chunk(now))
    return chunks, left, _merged(before)


def take_awaited(
    sequences: SequenceABC[Sequence], tokens: SequenceABC[Token | None], now: float
) -> TakenTokens:
    """Commit a launched step as `take_tokens` does: the `tokens` replace the placeholders.

    The sequences that are left need `complete_launch` instead of `advance`.
    """
    chunks: list[TokenChunk] = []
    left: list[int] = []
    before: list[float | None] = []
    place = -1
    for sequence, token in zip(sequences, tokens, strict=True):  # for all rows of all steps
        place += 1
        outputs, before_s, processed = sequence.output_ids, sequence.token_s, sequence.processed
        if (
            token is None
            or token in sequence.stop_ids
            or processed >= sequence.next_commit
            or processed >= sequence.last_processed
            or sequence.status is not _DECODING
            or sequence.cancel_requested
            or before_s is None
            or outputs[-1] != FUTURE_TOKEN
        ):
            left.append(place)
            continue
        before.append(before_s)
        sequence.in_flight, sequence.token_s = sequence.in_flight - 1, now
        sequence.tokens[-1] = outputs[-1] = token
        buffer = sequence.buffer
        if buffer is None:
            chunks.append(sequence.chunk(now, (token,)))
            continue
        ids = buffer.ids
        ids.append(token)
        if len(ids) >= buffer.limit:
            chunks.append(sequence.chunk(now))
    return chunks, left, _merged(before)


def _merged(times: list[float | None]) -> list[tuple[float | None, int]]:
    return [(time_s, len(list(group))) for time_s, group in groupby(times)]


def launch_sampling(sequences: SequenceABC[Sequence]) -> list[int]:
    """Launch sequences in the common case: decoding, and continuing whatever their token is.

    Returns the indices of the others, which are unchanged: `launch` them, and update their places.
    """
    left = []
    for place, sequence in enumerate(sequences):
        outputs = sequence.output_ids
        if (
            sequence.status is not _DECODING
            or sequence.cancel_requested
            or sequence.pause_requested
            or len(outputs) + 1 >= sequence.max_outputs
            or not outputs
            or outputs[-1] == FUTURE_TOKEN
        ):
            left.append(place)
            continue
        sequence.processed = sequence.active_end
        sequence.tokens.append(FUTURE_TOKEN)
        outputs.append(FUTURE_TOKEN)
    return left
