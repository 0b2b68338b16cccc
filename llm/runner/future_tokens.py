"""`FutureTokens`: tokens that a batch feeds while the previous batch is still sampling them.

    batch n      rows  a  b  c     samples   [ 7  4  9 ]   on the device
    batch n + 1  rows  c  d  a     input_ids [ ?  5  ? ]   `FUTURE_TOKEN` on the host
                                             [ 9  5  7 ]   filled in by the device

The host only decides the place of each token; it does not need the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count, repeat
from operator import ne

import numpy as np
import torch
from torch import Tensor

from llm.batch import ScheduledBatch, ScheduledRow
from llm.memory.transfer import to_device
from llm.request import Token, as_ids
from llm.sequence import AWAITED, FUTURE_TOKEN

MOST_RUNS = 8  # of rows that follow each other: beyond it a table of all rows is quicker


@dataclass(frozen=True, slots=True)
class FutureTokens:
    """Token `places[i]` of the batch's T is sampling row `sources[i]` of the previous batch.

    `places` None: the first tokens in order; `sources` None: every row, in order.
    """

    places: tuple[int, ...] | None = None
    sources: tuple[int, ...] | None = ()

    @classmethod
    def find(
        cls, batch: ScheduledBatch, names: tuple[str, ...], before: tuple[str, ...]
    ) -> FutureTokens:
        """Find the awaited tokens of a batch with sampling rows `names`, after a batch with rows
        `before`.

        Raises `ValueError` for a token that no row of the previous batch samples.
        """
        fed, ids = batch.columns.token_ids, batch.columns.request_id
        num_first = fed.count(AWAITED)
        if names == before and num_first == len(fed) == len(names):
            return cls(None, None)
        waiting: Sequence[int] = range(num_first)
        waiting_names: Sequence[str] = ids[:num_first]
        is_first = fed[:num_first].count(AWAITED) == num_first
        if not is_first or any(FUTURE_TOKEN in tokens for tokens in fed[num_first:]):
            waiting = [place for place, tokens in enumerate(fed) if FUTURE_TOKEN in tokens]
            waiting_names = [ids[place] for place in waiting]
        if not waiting:
            return cls()
        sources = _places(waiting_names, before)
        if -1 in sources or len(waiting) > num_first:
            wrong = next(
                batch.rows[place]
                for place, source in zip(waiting, sources, strict=True)
                if source < 0 or fed[place] != AWAITED
            )
            raise ValueError(
                f"request {wrong.request_id} feeds {wrong.token_ids}: the previous batch samples "
                f"for {list(before)}"
            )
        if waiting[-1] == len(waiting) - 1:
            return cls(None, sources)
        first_of = [0, *accumulate(map(len, fed))]
        return cls(tuple([first_of[place] for place in waiting]), sources)

    def __bool__(self) -> bool:
        """Whether there are any awaited tokens."""
        return self.sources is None or bool(self.sources)

    def num_first(self, num_tokens: int) -> int:
        """Return how many of the batch's tokens at its start are awaited, as far as is known."""
        if self.sources is None:
            return num_tokens
        return len(self.sources) if self.places is None else 0

    def point(self, ids: np.ndarray) -> None:
        """Write the indices of the previous batch's sampling rows into ids [T] of the host."""
        if self.sources is None:
            ids[:] = np.arange(len(ids))
        elif self.places is not None:
            ids[list(self.places)] = self.sources
        else:
            ids[: len(self.sources)] = self.sources

    def fill(self, input_ids: Tensor, sampled: Tensor) -> None:
        """Copy `sampled` [previous rows] into input_ids [T] without waiting."""
        if self.sources is None:
            input_ids.copy_(sampled)
        elif self.places is not None:
            places, sources = to_device(_indices(self.places, self.sources), input_ids.device)
            input_ids[places] = sampled[sources].to(input_ids.dtype)
        elif self.sources:
            sources = to_device(_indices(self.sources)[0], input_ids.device)
            input_ids[: len(sources)].copy_(sampled[sources])


NOTHING_AWAITED = FutureTokens()


def _places(names: Sequence[str], before: tuple[str, ...]) -> tuple[int, ...]:
    """Return the index in `before` of each name, or -1."""
    places: list[int] = []
    start = 0
    for _ in range(MOST_RUNS):  # most rows follow each other as before: between them some ended
        left = names[len(places) :]
        if not left:
            return tuple(places)
        if left[0] not in before[start:]:
            break
        first = before.index(left[0], start)
        differ = map(ne, left, before[first:])
        start = first + next(compress(count(), differ), min(len(left), len(before) - first))
        places += range(first, start)
    place_of = dict(zip(before, range(len(before)), strict=True))
    return tuple(map(place_of.get, names, repeat(-1)))


def _indices(*rows: Sequence[int]) -> Tensor:
    """Return int64 [m, n]."""
    return torch.from_numpy(np.array(rows, dtype=np.int64))


def awaits_token(row: ScheduledRow) -> bool:
    """Whether a placeholder stands for the row's last token."""
    return bool(row.output_ids) and row.output_ids[-1] == FUTURE_TOKEN


def known_outputs(
    rows: Sequence[ScheduledRow], sampled: Mapping[str, Token]
) -> tuple[ScheduledRow, ...]:
    """Return the rows with `sampled` tokens, by request id, in place of placeholders.

    A placeholder without a sampled token stays: it still counts as a token.
    """
    return tuple(
        row._replace(output_ids=(*row.output_ids[:-1], sampled[row.request_id]))
        if awaits_token(row) and row.request_id in sampled
        else row
        for row in rows
    )


def split_outputs(
    rows: Sequence[ScheduledRow], sampled: Mapping[str, Token]
) -> tuple[tuple[ScheduledRow, ...], list[Sequence[int]]]:
    """Return the rows with `output_ids` before the placeholder, and the tokens it stood for."""
    settled: list[ScheduledRow] = []
    latest: list[Sequence[int]] = []
    for row in rows:
        is_known = awaits_token(row) and row.request_id in sampled
        settled.append(row._replace(output_ids=row.output_ids[:-1]) if is_known else row)
        latest.append(as_ids((sampled[row.request_id],)) if is_known else ())
    return tuple(settled), latest
