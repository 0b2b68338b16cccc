"""`GraphRows`: the rows of a replayed forward on the host, and the numbers to load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, compress
from operator import add

import numpy as np

from llm.attention.base import CapturedShape
from llm.batch import (
    NO_CODE,
    ForwardBatch,
    ForwardMode,
    RowPages,
    ScheduledBatch,
    count_singles,
    frame_rows,
)
from llm.kv_cache.state_pool import state_slots
from llm.kv_cache.state_slots import PADDING_STATE
from llm.request import Token, as_ids
from llm.runner.future_tokens import NOTHING_AWAITED, FutureTokens
from llm.runner.graphs.input_buffers import Inputs, TokenViews

PADDING_PAGES = (0,)
FIRST_AWAITED = NO_CODE - 1  # in place of the first code: frame 0 of the table of latest frames


@dataclass(frozen=True, slots=True)
class GraphRows:
    """B rows with T tokens."""

    mode: ForwardMode
    request_ids: tuple[str, ...]
    token_ids: Sequence[Token]  # [T]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]  # with the fed tokens
    pages: tuple[Sequence[int], ...]
    num_singles: int  # leading rows of one token
    sampling_rows: tuple[int, ...]
    logit_offsets: tuple[int, ...]  # [B + 1] as in `ModelInputs`: only rows that sample have logits

    @classmethod
    def of(cls, batch: ScheduledBatch) -> GraphRows:
        """Create from a scheduled batch."""
        mode, columns = batch.mode, batch.columns
        fed, samples = columns.token_ids, columns.samples
        lengths, num_singles = (1,) * len(fed), len(fed)
        if not mode.is_decode:
            lengths = tuple(map(len, fed))
            num_singles = count_singles(lengths)
        offsets = tuple(range(len(fed) + 1))
        sampling = offsets[:-1]
        if not all(samples):
            sampling = tuple(compress(sampling, samples))
            offsets = tuple(accumulate(samples, initial=0))
        return cls(
            mode,
            columns.request_id,
            list(chain.from_iterable(fed)),
            lengths,
            tuple(map(add, columns.start, lengths)),
            columns.pages,
            num_singles,
            sampling,
            offsets,
        )

    @classmethod
    def decoding(
        cls,
        request_ids: tuple[str, ...],
        context_lens: tuple[int, ...],
        pages: tuple[Sequence[int], ...],
    ) -> GraphRows:
        """Create rows that feed one token each, whose values are only on the device."""
        count = len(request_ids)
        lengths, every = (1,) * count, tuple(range(count))
        ids = [0] * count
        decode = ForwardMode.DECODE
        offsets = tuple(range(count + 1))
        return cls(decode, request_ids, ids, lengths, context_lens, pages, count, every, offsets)

    @classmethod
    def padding(cls, num_rows: int) -> GraphRows:
        """Create padding rows, of one token each."""
        return cls.decoding(("",) * num_rows, (1,) * num_rows, (PADDING_PAGES,) * num_rows)

    def used_pages(self, page_size: int) -> RowPages:
        """Return the pages that hold the rows' contexts."""
        return RowPages.of(page_size, self.pages, self.context_lens)

    def batch(self, tokens: TokenViews, first: int, pages: RowPages) -> ForwardBatch:
        """Return the forward of the tokens from `first` on."""
        input_ids, positions, slots = tokens.of(first, first + len(self.token_ids))
        return ForwardBatch(
            mode=self.mode,
            request_ids=self.request_ids,
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            pages=self.pages,
            page_size=pages.page_size,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            row_pages=pages,
        )

    def _fill_frames(self, ids: np.ndarray, awaited: FutureTokens) -> None:
        """Write the codes of the tokens into ids [T, K]; those of frame n at the head of the table
        are `FIRST_AWAITED` − n.
        """
        ids[:] = frame_rows(self.token_ids, ids.shape[1])
        heads = np.full(len(ids), -1, dtype=np.int64)
        awaited.point(heads)
        is_awaited = heads >= 0
        ids[is_awaited, 0] = FIRST_AWAITED - heads[is_awaited]

    def fill_states(self, inputs: Inputs) -> None:
        """Write the slots of the rows' recurrent states, and of padding rows."""
        slots = inputs.states.take().reshape(2, -1)
        slots[:] = PADDING_STATE
        count = len(self.request_ids)
        slots[:, :count] = state_slots(self.pages, self.context_lens, self.query_lens)

    def fill(
        self,
        inputs: Inputs,
        shape: CapturedShape,
        pages: RowPages,
        *,
        first_id: int,
        awaited: FutureTokens = NOTHING_AWAITED,
        num_ids: int = 1,
    ) -> None:
        """Write the inputs of all tokens of a shape, with padding tokens.

        The id of token t is position `first_id` + t of the table; awaited tokens are at its head.
        With `num_ids` > 1 a token is that many codes, see `_fill_frames`.
        """
        first = shape.first_token(self.num_singles)
        last = first + len(self.token_ids)
        ids, positions, slots = (part.take() for part in inputs[1:4])
        for numbers, padding in ((ids, first_id), (positions, 0), (slots, 0)):
            numbers[: first * num_ids if numbers is ids else first] = padding
            numbers[last * num_ids if numbers is ids else last :] = padding
        if num_ids > 1:
            self._fill_frames(ids.reshape(-1, num_ids)[first:last], awaited)
        else:
            later = awaited.num_first(len(self.token_ids))
            ids[first + later : last] = as_ids(self.token_ids[later:])
            ids[first + later : last] += first_id
            awaited.point(ids[first:last])
        are_single = self.num_singles == len(self.query_lens)
        lengths = np.array(self.query_lens) if shape.num_prompts else self.query_lens
        positions[first:last], slots[first:last] = pages.places(lengths, are_single=are_single)
        if shape.num_prompts:
            ends = np.cumsum(lengths)
            if len(self.sampling_rows) < len(ends):
                ends = ends[list(self.sampling_rows)]
            sampled = inputs.sampled.take()
            sampled[: len(ends)] = first + ends - 1
            sampled[len(ends) :] = 0
