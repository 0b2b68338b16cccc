"""`GraphRows`: the rows of a replayed forward as the host knows them, and the numbers to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add

import numpy as np

from llm.attention.base import CapturedShape
from llm.batch import ForwardBatch, ForwardMode, ScheduledBatch
from llm.runner.input_buffers import NUM_COLUMNS, Columns

PADDING_PAGES = (0,)


@dataclass(frozen=True, slots=True)
class GraphRows:
    """Of B rows with T tokens."""

    mode: ForwardMode
    request_ids: tuple[str, ...]
    token_ids: Sequence[int]  # [T]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # the fed tokens counted
    pages: tuple[Sequence[int], ...]
    num_singles: int  # leading rows of one token
    sampling_rows: tuple[int, ...]

    @classmethod
    def of(cls, batch: ScheduledBatch) -> GraphRows:
        """Of a scheduled batch."""
        rows, mode = batch.rows, batch.mode
        names, fed, starts, pages, *_ = zip(*rows, strict=True)  # the quickest way to columns
        lengths, num_singles = (1,) * len(rows), len(rows)
        if not mode.is_decode:
            lengths = tuple(map(len, fed))
            num_singles = next((n for n, length in enumerate(lengths) if length > 1), len(rows))
        sampling: Sequence[int] = range(len(rows))
        if not (batch.is_plain and mode.is_decode):
            sampling = [place for place, row in enumerate(rows) if row.samples]
        return cls(
            mode,
            names,
            list(chain.from_iterable(fed)),
            lengths,
            tuple(map(add, starts, lengths)),
            pages,
            num_singles,
            tuple(sampling),
        )

    @classmethod
    def decoding(
        cls,
        request_ids: tuple[str, ...],
        context_lens: tuple[int, ...],
        pages: tuple[Sequence[int], ...],
    ) -> GraphRows:
        """Rows that feed a token each which only the device knows."""
        count = len(request_ids)
        lengths, every = (1,) * count, tuple(range(count))
        ids = [0] * count
        decode = ForwardMode.DECODE
        return cls(decode, request_ids, ids, lengths, context_lens, pages, count, every)

    @classmethod
    def padding(cls, num_rows: int) -> GraphRows:
        """Rows that belong to no request, of one token each."""
        return cls.decoding(("",) * num_rows, (1,) * num_rows, (PADDING_PAGES,) * num_rows)

    @property
    def logit_offsets(self) -> tuple[int, ...]:
        """[B + 1] as in `ModelInputs`: only rows that sample have logits."""
        count = len(self.query_lens)
        if len(self.sampling_rows) == count:
            return tuple(range(count + 1))
        has_logits = np.zeros(count + 1, dtype=np.int64)
        has_logits[np.array(self.sampling_rows, dtype=np.int64) + 1] = 1
        return tuple(np.cumsum(has_logits).tolist())

    def batch(self, columns: Columns, first: int, page_size: int) -> ForwardBatch:
        """The forward whose tokens lie in the columns from `first` on."""
        last = first + len(self.token_ids)
        return ForwardBatch(
            mode=self.mode,
            request_ids=self.request_ids,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            pages=self.pages,
            page_size=page_size,
            input_ids=columns.ids[first:last],
            positions=columns.positions[first:last],
            slot_mapping=columns.slots[first:last],
        )

    def numbers(self, shape: CapturedShape, num_sampled: int, page_size: int) -> np.ndarray:
        """int64 [3 × T + S] of all tokens of a shape, as `InputBuffers` loads them."""
        num_tokens = shape.num_tokens
        numbers = np.zeros(NUM_COLUMNS * num_tokens + num_sampled, dtype=np.int64)
        first = shape.first_token(self.num_singles)
        last = first + len(self.token_ids)
        columns = numbers[: NUM_COLUMNS * num_tokens].reshape(NUM_COLUMNS, num_tokens)
        columns[0, first:last] = self.token_ids
        self._set_places(columns[1:, first:last], page_size)
        if num_sampled and self.sampling_rows:
            ends = np.cumsum(np.array(self.query_lens))[list(self.sampling_rows)]
            start = NUM_COLUMNS * num_tokens
            numbers[start : start + len(ends)] = first + ends - 1
        return numbers

    def _set_places(self, places: np.ndarray, size: int) -> None:
        """Positions and slots into int64 [2, T]."""
        singles = self.num_singles
        if singles:
            positions = np.array(self.context_lens[:singles], dtype=np.int64) - 1
            index = (positions // size).tolist()
            found = [table[at] for table, at in zip(self.pages[:singles], index, strict=True)]
            places[0, :singles] = positions
            places[1, :singles] = np.array(found, dtype=np.int64) * size + positions % size
        fed = singles
        for row in range(singles, len(self.query_lens)):
            count, context = self.query_lens[row], self.context_lens[row]
            positions = np.arange(context - count, context)
            pages = np.asarray(self.pages[row], dtype=np.int64)[positions // size]
            places[0, fed : fed + count] = positions
            places[1, fed : fed + count] = pages * size + positions % size
            fed += count
