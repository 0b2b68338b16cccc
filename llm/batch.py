"""Values of one step: the scheduler's decision (host), the device's inputs and outputs.

    Scheduler.schedule() -> ScheduledBatch -> pipeline.execute() -> StepOutput -> Scheduler.commit()
                                  |                             ^
                                  v                             |
                   ForwardBatch -> ModelInputs -> ModelOutputs -> token ids

The lower row are the device's values; this module does not import torch for them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import numpy as np

from llm.request import SamplingParams, Token, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor


NO_CODE = -1  # in the ids of a frame: the position is a text token


@dataclass(frozen=True, slots=True)
class RowPages:
    """Page ids of B rows, without those allocated for later tokens."""

    page_size: int
    context_lens: np.ndarray  # int32 [B], with the fed tokens
    counts: np.ndarray  # int32 [B] pages of each row
    ids: np.ndarray  # int32 [N], row by row

    @classmethod
    def of(
        cls, page_size: int, pages: Sequence[Sequence[int]], context_lens: Sequence[int]
    ) -> RowPages:
        """Create from page tables."""
        lengths = np.array(context_lens, dtype=np.int32)
        counts = (lengths + (page_size - 1)) // page_size
        if set(map(type, pages)) == {array}:
            joined = b"".join(pages)  # type: ignore[arg-type]  # arrays are buffers
            if len(joined) == 4 * counts.sum():  # none has too few, so none has more
                return cls(page_size, lengths, counts, np.frombuffer(joined, np.int32))
        ids = array("i")
        for table, count in zip(pages, counts.tolist(), strict=True):
            ids.extend(table if len(table) == count else table[:count])
        return cls(page_size, lengths, counts, np.array(ids, dtype=np.int32))

    def places(
        self, query_lens: Sequence[int] | np.ndarray, *, are_single: bool
    ) -> tuple[np.ndarray, ...]:
        """Return positions and slots, int64 [T], of the last `query_lens` [B] tokens of each
        context.

        `are_single`: every row feeds its last token only.
        """
        size, lengths = self.page_size, self.context_lens.astype(np.int64)
        ends = self.counts.astype(np.int64).cumsum()
        if are_single:
            positions, indices = lengths - 1, ends - 1
        else:
            fed = np.asarray(query_lens, dtype=np.int64)
            before = fed.cumsum() - fed  # tokens of the rows before
            positions = np.arange(fed.sum()) + (lengths - fed - before).repeat(fed)
            indices = (ends - self.counts).repeat(fed) + positions // size
        return positions, self.ids[indices].astype(np.int64) * size + positions % size


class ForwardMode(Enum):
    """Kind of the rows of a batch."""

    EXTEND = "extend"  # prompt tokens only (prefill, context encoding)
    DECODE = "decode"  # one token per row
    MIXED = "mixed"  # both
    IDLE = "idle"  # no rows

    @property
    def is_extend(self) -> bool:
        """Whether rows may feed more than one token, as in a mixed batch."""
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
    """One sequence's part of a step.

    The sequences `pages` and `output_ids` are views of live scheduler state: read-only, and valid
    until the step is committed. Page tables only grow.
    """

    request_id: str
    token_ids: tuple[Token, ...]  # the tokens fed in this step
    start: int  # position of token_ids[0] = tokens already in the KV cache
    pages: Sequence[int]  # page ids that cover positions [0, start + len(token_ids) + steps - 1)
    is_extend: bool  # prompt tokens (also if there is only one)
    samples: bool  # False for a prompt chunk that is not the last
    sampling: SamplingParams
    output_ids: Sequence[Token] = ()  # generated so far, for penalties and minimum lengths

    lora: str = ""  # name of its adapter
    embeds: bool = False  # request for vectors: `samples` marks the row that completes them

    @property
    def generates(self) -> bool:
        """Whether a token is sampled for the row."""
        return self.samples and not self.embeds

    @property
    def echoes(self) -> bool:
        """Whether log-probabilities of the fed tokens are requested."""
        return self.is_extend and self.sampling.echo

    @property
    def context_len(self) -> int:
        """Number of tokens in the cache after this step."""
        return self.start + len(self.token_ids)


class RowColumns(NamedTuple):
    """The fields of many `ScheduledRow`s, column by column."""

    request_id: tuple[str, ...] = ()
    token_ids: tuple[tuple[Token, ...], ...] = ()
    start: tuple[int, ...] = ()
    pages: tuple[Sequence[int], ...] = ()
    is_extend: tuple[bool, ...] = ()
    samples: tuple[bool, ...] = ()
    sampling: tuple[SamplingParams, ...] = ()
    output_ids: tuple[Sequence[Token], ...] = ()
    lora: tuple[str, ...] = ()
    embeds: tuple[bool, ...] = ()


class Rows(Sequence[ScheduledRow]):
    """Rows that are kept as columns. A row is created when it is read: most steps need none."""

    __slots__ = ("_rows", "columns")

    def __init__(self, columns: RowColumns) -> None:
        self.columns = columns
        self._rows: tuple[ScheduledRow, ...] | None = None  # once all of them were read

    def _all(self) -> tuple[ScheduledRow, ...]:
        if self._rows is None:
            self._rows = tuple(map(ScheduledRow._make, zip(*self.columns, strict=True)))
        return self._rows

    def __iter__(self) -> Iterator[ScheduledRow]:
        return iter(self._all())

    @overload
    def __getitem__(self, place: int) -> ScheduledRow: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[ScheduledRow]: ...

    def __getitem__(self, place: int | slice) -> ScheduledRow | Sequence[ScheduledRow]:
        if isinstance(place, slice) or self._rows is not None:
            return self._all()[place]
        return ScheduledRow._make([column[place] for column in self.columns])

    def __len__(self) -> int:
        return len(self.columns.request_id)


def columns_of(rows: Sequence[ScheduledRow]) -> RowColumns:
    """Return the columns of rows, which are faster to read than a field of each row."""
    return rows.columns if isinstance(rows, Rows) else RowColumns(*zip(*rows, strict=True))


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The rows of one step, and how many decode forwards to run for them.

    `is_plain`: every row is known to request its next token and nothing else (see
    `Sequence.is_plain`), so that the rows need not be inspected one by one.
    """

    rows: Sequence[ScheduledRow]
    mode: ForwardMode
    num_steps: int = 1
    is_plain: bool = False
    _columns: list[RowColumns] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def columns(self) -> RowColumns:
        """Return the columns of `rows`, see `columns_of`."""
        if not self._columns:
            self._columns.append(columns_of(self.rows))
        return self._columns[0]

    @property
    def sampling_rows(self) -> Sequence[ScheduledRow]:
        """Return the rows that sample: all but prompt chunks that are not the last."""
        samples = self.columns.samples
        if all(samples):
            return self.rows
        return Rows(RowColumns._make(tuple(compress(c, samples)) for c in self.columns))

    @property
    def num_tokens(self) -> int:
        """Number of tokens fed to the first forward."""
        if self.mode is ForwardMode.DECODE:
            return len(self.rows)
        return sum(map(len, self.columns.token_ids))

    def __bool__(self) -> bool:
        return bool(self.rows)


class SampledTokens(Mapping[str, tuple[Token, ...]]):
    """The one token that a step has sampled for each of its requests: read in order."""

    __slots__ = ("names", "tokens")

    def __init__(self, names: tuple[str, ...], tokens: Sequence[Token]) -> None:
        self.names = names
        self.tokens = tokens

    def __getitem__(self, request_id: str) -> tuple[Token, ...]:
        if request_id not in self.names:
            raise KeyError(request_id)
        return (self.tokens[self.names.index(request_id)],)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.tokens)


def first_tokens(
    sampled: Mapping[str, tuple[Token, ...]], request_ids: tuple[str, ...]
) -> Sequence[Token | None]:
    """Return the first token sampled for each request; None for one without tokens."""
    if isinstance(sampled, SampledTokens):
        if request_ids == sampled.names:
            return sampled.tokens
        found = dict(zip(sampled.names, sampled.tokens, strict=True))
    else:
        found = {request_id: tokens[0] for request_id, tokens in sampled.items() if tokens}
    return list(map(found.get, request_ids))


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Results of one step for one request."""

    token_ids: tuple[Token, ...] = ()  # one per decode forward
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, where they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # one per prompt token fed, where echoed
    embeddings: tuple[bytes, ...] = ()  # little-endian float32 vectors
    failure: str = ""  # why the request cannot continue; empty: it can


@dataclass(frozen=True, slots=True)
class StepOutput(Mapping[str, RequestOutput]):
    """Sampled tokens by request id, one per decode forward; rows that did not sample are absent.

    Stop ids are included: the scheduler decides when a sequence ends. `failures` has the reasons
    why requests cannot continue; the rest of the batch is not affected. `prompt_logprobs` has one
    entry per token that an echoing prompt row has fed.

    It is also a read-only mapping from request ids to `RequestOutput`: `len(output)` is the number
    of requests that the step has results for, `output[request_id]` is one of them, and an unknown
    id raises `KeyError`.
    """

    token_ids: Mapping[str, tuple[Token, ...]]
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    embeddings: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    def __getitem__(self, request_id: str) -> RequestOutput:
        if request_id not in self._ids():
            raise KeyError(request_id)
        return RequestOutput(
            self.token_ids.get(request_id, ()),
            self.logprobs.get(request_id, ()),
            self.prompt_logprobs.get(request_id, ()),
            self.embeddings.get(request_id, ()),
            self.failures.get(request_id, ""),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids())

    def __len__(self) -> int:
        return len(self._ids())

    def _ids(self) -> dict[str, None]:
        """Every request that there is something of, in the order of the tokens."""
        parts = (self.token_ids, self.failures, self.prompt_logprobs, self.embeddings)
        return dict.fromkeys(itertools.chain.from_iterable(parts))


class ReturnLogits(Enum):
    """Rows for which the language-model head is computed.

    An argument of `PipelineModel`, for programs that make and run a model themselves. The engine
    makes every model with `LAST_TOKEN`: its requests ask for a prompt's log-probabilities by
    `SamplingParams.echo`, which adds the rows of that request alone, and a draft's rows are chosen
    by the verification. `VARIABLE` and `ALL` are not an option of the service.
    """

    LAST_TOKEN = "last_token"  # one per sampling request
    VARIABLE = "variable"  # the last n of each sampling request
    ALL = "all"  # every token fed


class ReturnHiddenStates(Enum):
    """Rows of the last layer's output that are returned.

    An argument of `PipelineModel`, for programs that make and run a model themselves. The engine
    uses `ALL_NORMALIZED` for embedding models and `NONE` for all others; no request can ask for
    hidden states. A model that transformers runs has none and raises `CheckpointError` when they
    are asked for, and a model that hands them out is not captured in CUDA graphs.
    """

    NONE = "none"
    LAST = "last"  # one per request, before the final norm
    ALL = "all"
    ALL_NORMALIZED = "all_normalized"  # after the final norm


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one forward, ragged: row b feeds `query_lens[b]` of the T tokens.

    `context_lens` count the tokens in the cache after the forward, with the fed ones: the position
    of a decode row is its context length − 1.
    """

    mode: ForwardMode
    request_ids: tuple[str, ...]  # [B]
    query_lens: tuple[int, ...]  # [B]
    context_lens: tuple[int, ...]  # [B]
    pages: tuple[Sequence[int], ...]  # [B] page tables, as in `ScheduledRow`
    page_size: int
    input_ids: Tensor  # int64 [T]; [T, K] for frames of K ids, see `frame_rows`
    positions: Tensor  # int64 [T]; [3, T] by section of the rotation, see `RotaryConfig`
    slot_mapping: Tensor  # int64 [T] slots for the keys and values
    # [B] number of best tokens to return; None: no log-probabilities
    top_logprobs_nums: tuple[int, ...] | None = None
    row_pages: RowPages | None = None  # arrays of `pages` and `context_lens`, where available
    vectors: Tensor | None = None  # float32 [n, H] of the tokens that are vectors, in order
    # int64 [B] slots of recurrent states that the rows read and write; None: those of `pages`
    states: tuple[Tensor, Tensor] | None = None

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Return [B + 1] index of the first token of each row, then T."""
        offsets = [0]
        for length in self.query_lens:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)

    @property
    def num_singles(self) -> int:
        """Number of leading rows that feed one token each."""
        if self.mode is ForwardMode.DECODE:
            return len(self.query_lens)
        return count_singles(self.query_lens)

    def next_places(self) -> tuple[tuple[int, ...], list[int]]:
        """Return positions [B] and slots [B] of the tokens that the rows feed next."""
        size = self.page_size
        return self.context_lens, [
            pages[position // size] * size + position % size
            for pages, position in zip(self.pages, self.context_lens, strict=True)
        ]

    def advanced(self, next_tokens: Tensor, places: Tensor) -> ForwardBatch:
        """Return the decode forward that feeds one sampled token [B] to each row.

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


def frame_rows(tokens: Sequence[Token], num_ids: int) -> np.ndarray:
    """Return int64 [T, `FrameShape.num_ids`]: the ids of frames, text tokens followed by
    `NO_CODE`s, or of a vector `NO_CODE`s alone.
    """
    rest = (NO_CODE,) * (num_ids - 1)
    rows = [
        token if isinstance(token, tuple) else (token if isinstance(token, int) else NO_CODE, *rest)
        for token in tokens
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, num_ids)


def vectors_of(tokens: Sequence[Token]) -> np.ndarray | None:
    """Return float32 [n, H]: the vectors among the tokens, in order; None if there are none."""
    found = [token for token in tokens if isinstance(token, bytes)]
    return np.frombuffer(b"".join(found), "<f4").reshape(len(found), -1) if found else None


def host_tokens(tokens: Tensor) -> list[Token]:
    """Return sampled tokens [B], or frames [B, K], as values of the host; waits for the device."""
    values: list[Any] = tokens.tolist()
    return values if tokens.dim() == 1 else list(map(tuple, values))


def count_singles(query_lens: Sequence[int]) -> int:
    """Count the leading rows that feed one token each."""
    num_ones = query_lens.count(1)
    if query_lens[:num_ones].count(1) == num_ones:
        return num_ones  # without a call for each row
    are_longer = map((1).__lt__, query_lens)
    return next(compress(itertools.count(), are_longer), len(query_lens))


class KVSlots(NamedTuple):
    """Destination of one layer's new keys and values: slot = page × page_size + offset."""

    keys: Tensor  # [P, page_size, Hkv, D], a view
    values: Tensor  # [P, page_size, Hkv, D], a view
    slots: Tensor  # int64 [T]


class LayerCache(Protocol):
    """Access of a layer to its keys and values."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [T, 2, Hkv, D] keys and values; attend with queries [T, H, D]; return [T, H ×
        D].
        """


class KVCacheInputs(LayerCache, Protocol):
    """Access of a model to its keys and values in one planned forward."""

    @property
    def forward_batch(self) -> ForwardBatch: ...

    def slots(self, layer: int) -> KVSlots | None:
        """Return where a kernel may store what `attend` would; None when only `attend` can
        store.
        """

    def attend_stored(self, layer: int, query: Tensor) -> Tensor:
        """Like `attend`, for keys and values that are in their `slots` already."""

    def advanced(self, next_tokens: Tensor) -> KVCacheInputs:
        """Return the inputs of the decode forward that feeds `next_tokens` [B]."""


@dataclass(kw_only=True, slots=True)
class ModelInputs:
    """Arguments of `PipelineModel.execute`.

    Logits are computed for the tokens `logit_rows` (None: for all T); those of batch row b are rows
    `logit_offsets[b] : logit_offsets[b + 1]`. A row that does not sample may have none.
    """

    forward_batch: ForwardBatch
    kv_cache_inputs: KVCacheInputs | None = None
    sampling_rows: tuple[int, ...] = ()  # batch rows that sample, ascending
    logit_rows: Tensor | None = None  # int64 [R]
    logit_offsets: tuple[int, ...] = (0,)  # [B + 1]
    adapters: tuple[str, ...] = ()  # [B] adapter names, '' for the base model

    def update(self, **values: object) -> None:
        """Set existing fields to the values that are not None."""
        for item in fields(self):
            if values.get(item.name) is not None:
                setattr(self, item.name, values[item.name])


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """Results of one forward: raw float32 logits, without temperature and penalties."""

    logits: Tensor  # [R, V]
    next_token_logits: Tensor  # [sampling rows, V], the last row of each
    logit_offsets: tuple[int, ...]  # [B + 1] as in `ModelInputs`
    hidden_states: Tensor | None = None
