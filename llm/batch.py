"""One step's values: what the scheduler decided (host), what the device is fed and answers.

    Scheduler.schedule() -> ScheduledBatch -> pipeline.execute() -> StepOutput -> Scheduler.commit()
                                  |                             ^
                                  v                             |
                   ForwardBatch -> ModelInputs -> ModelOutputs -> SampledTokens

The lower row are the device's values; this module does not import torch for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llm.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from llm.batch_pages import RowPages


class ForwardMode(Enum):
    """What kind of rows a batch holds."""

    EXTEND = "extend"  # prompt tokens only (prefill, context encoding)
    DECODE = "decode"  # one token per row
    MIXED = "mixed"  # both
    IDLE = "idle"  # no rows

    @property
    def is_extend(self) -> bool:
        """Whether rows may feed more than one token: a mixed batch counts as such."""
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED)

    @property
    def is_decode(self) -> bool:
        """Whether every row feeds one token."""
        return self is ForwardMode.DECODE

    @property
    def is_idle(self) -> bool:
        """Whether there are no rows."""
        return self is ForwardMode.IDLE


class ScheduledRow(NamedTuple):
    """One sequence's share of a step.

    The sequences `pages` and `output_ids` are views of live scheduler state: read-only, and
    valid until the step is committed. Pages are added to a table, those in it stay what they are.
    """

    request_id: str
    token_ids: tuple[int, ...]  # the tokens fed in this step
    start: int  # position of token_ids[0] = tokens already in the KV cache
    pages: Sequence[int]  # page ids that cover positions [0, start + len(token_ids) + steps - 1)
    is_extend: bool  # prompt tokens (also when it is only one)
    samples: bool  # False for a prompt chunk that is not the last
    sampling: SamplingParams
    output_ids: Sequence[int] = ()  # generated so far, for penalties and minimum lengths

    lora: str = ""  # the adapter it is computed with
    embeds: bool = False  # its vectors are wanted: `samples` marks the row they are complete with

    @property
    def generates(self) -> bool:
        """Whether a token is sampled for it."""
        return self.samples and not self.embeds

    @property
    def echoes(self) -> bool:
        """Whether the log-probabilities of the tokens fed are wanted."""
        return self.is_extend and self.sampling.echo

    @property
    def context_len(self) -> int:
        """Tokens in the cache once this step has run."""
        return self.start + len(self.token_ids)


class RowColumns(NamedTuple):
    """`ScheduledRow`s the other way round."""

    request_id: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    start: tuple[int, ...] = ()
    pages: tuple[Sequence[int], ...] = ()
    is_extend: tuple[bool, ...] = ()
    samples: tuple[bool, ...] = ()
    sampling: tuple[SamplingParams, ...] = ()
    output_ids: tuple[Sequence[int], ...] = ()
    lora: tuple[str, ...] = ()
    embeds: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The rows of one step, and how many decode forwards to run for them.

    `is_plain`: every row is known to want its next token and nothing else (see
    `Sequence.is_plain`), so nobody need look at each of them to find that out.
    """

    rows: tuple[ScheduledRow, ...]
    mode: ForwardMode
    num_steps: int = 1
    is_plain: bool = False
    _columns: list[RowColumns] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def columns(self) -> RowColumns:
        """The same as `rows`; quicker than to ask each of them for a field."""
        if not self._columns:
            self._columns.append(RowColumns(*zip(*self.rows, strict=True)))
        return self._columns[0]

    @property
    def sampling_rows(self) -> tuple[ScheduledRow, ...]:
        """Those that are not chunks of prompts: all that decode."""
        if self.is_plain and self.mode is ForwardMode.DECODE:
            return self.rows
        return tuple([row for row in self.rows if row.samples])

    @property
    def num_tokens(self) -> int:
        """Tokens fed to the first forward."""
        if self.mode is ForwardMode.DECODE:
            return len(self.rows)
        return sum([len(row.token_ids) for row in self.rows])

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Sampled tokens by request id, one per decode forward; rows that did not sample are absent.

    A stop id is still among them: the scheduler decides what ends a sequence. `failures` says of
    requests that cannot go on what went wrong with them; the rest of the batch is not affected.
    `prompt_logprobs` has an entry for each token that an echoing prompt row has fed.
    """

    token_ids: Mapping[str, tuple[int, ...]]
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    embeddings: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but tokens."""
        return not (self.logprobs or self.failures or self.prompt_logprobs)


class ReturnLogits(Enum):
    """Which rows the language-model head is computed for."""

    LAST_TOKEN = "last_token"  # one per sampling request
    VARIABLE = "variable"  # the last n of each sampling request
    ALL = "all"  # every token fed


class ReturnHiddenStates(Enum):
    """Which rows of the last layer's output are handed out."""

    NONE = "none"
    LAST = "last"  # one per request, before the final norm
    ALL = "all"
    ALL_NORMALIZED = "all_normalized"  # after the final norm


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The rows of one forward, ragged: row b feeds `query_lens[b]` of the T tokens.

    `context_lens` count the tokens in the cache once the forward has run, the fed ones included:
    a decode row's position is its context length − 1.
    """

    mode: ForwardMode
    request_ids: tuple[str, ...]  # [B]
    query_lens: tuple[int, ...]  # [B]
    context_lens: tuple[int, ...]  # [B]
    pages: tuple[Sequence[int], ...]  # [B] page tables, as in `ScheduledRow`
    page_size: int
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T] where each token's keys and values go
    top_logprobs_nums: tuple[int, ...] | None = None  # [B] best ones wanted; None: no log-probs
    row_pages: RowPages | None = None  # what `pages` and `context_lens` say, where it is known

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """[B + 1] first token of each row, then T."""
        offsets = [0]
        for length in self.query_lens:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)

    @property
    def num_singles(self) -> int:
        """Leading rows that feed one token each."""
        if self.mode is ForwardMode.DECODE:
            return len(self.query_lens)
        return count_singles(self.query_lens)

    def next_places(self) -> tuple[tuple[int, ...], list[int]]:
        """[2][B] position and slot of the token that each row feeds after this forward."""
        size = self.page_size
        return self.context_lens, [
            pages[position // size] * size + position % size
            for pages, position in zip(self.pages, self.context_lens, strict=True)
        ]

    def advanced(self, next_tokens: Tensor, places: Tensor) -> ForwardBatch:
        """The decode forward that feeds one sampled token [B] to each row.

        `places` [2, B] are the `next_places`, on the device.
        """
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            request_ids=self.request_ids,
            query_lens=(1,) * len(self.query_lens),
            context_lens=tuple(length + 1 for length in self.context_lens),
            pages=self.pages,
            page_size=self.page_size,
            input_ids=next_tokens.long(),
            positions=places[0],
            slot_mapping=places[1],
        )


def count_singles(query_lens: Sequence[int]) -> int:
    """Leading rows that feed one token each."""
    are_longer = map((1).__lt__, query_lens)
    return next(itertools.compress(itertools.count(), are_longer), len(query_lens))


class KVSlots(NamedTuple):
    """Where one layer's new keys and values belong: slot = page × page_size + offset."""

    keys: Tensor  # [P, page_size, Hkv, D], a view
    values: Tensor  # the same
    slots: Tensor  # int64 [T]


class KVCacheInputs(Protocol):
    """A model's way to its keys and values: one planned forward."""

    @property
    def forward_batch(self) -> ForwardBatch: ...

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [T, 2, Hkv, D] keys and values, answer queries [T, H, D] with [T, H × D]."""

    def slots(self, layer: int) -> KVSlots | None:
        """Where a kernel may store what `attend` would; None: only `attend` knows how."""

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """`attend` for keys and values that are in their `slots` already."""

    def advanced(self, next_tokens: Tensor) -> KVCacheInputs:
        """The same for the decode forward that feeds `next_tokens` [B]."""


@dataclass(kw_only=True, slots=True)
class ModelInputs:
    """What `PipelineModel.execute` is fed.

    Logits are computed for the tokens `logit_rows` (None: for all T); those of batch row b are
    rows `logit_offsets[b] : logit_offsets[b + 1]`. A row that does not sample may have none.
    """

    forward_batch: ForwardBatch
    kv_cache_inputs: KVCacheInputs | None = None
    sampling_rows: tuple[int, ...] = ()  # batch rows whose next token is wanted, ascending
    logit_rows: Tensor | None = None  # int64 [R]
    logit_offsets: tuple[int, ...] = (0,)  # [B + 1]
    adapters: tuple[str, ...] = ()  # [B] the name of each row's, '' for the base model

    def update(self, **values: object) -> None:
        """Set the fields that exist to the values that are not None."""
        for item in fields(self):
            if values.get(item.name) is not None:
                setattr(self, item.name, values[item.name])


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """One forward's results: raw float32 logits, no temperature and no penalties."""

    logits: Tensor  # [R, V]
    next_token_logits: Tensor  # [sampling rows, V], the last of each
    logit_offsets: tuple[int, ...]  # [B + 1] as in `ModelInputs`
    hidden_states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each sampling row of a forward."""

    token_ids: Tensor  # int32 [sampling rows]
    logprobs: tuple[TokenLogprob | None, ...] = ()  # as many, or none at all
