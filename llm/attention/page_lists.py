"""`PageLists`: the page tables of a batch's rows in one piece, as paged kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm.batch import ForwardBatch, RowPages


class RowLists(NamedTuple):
    """The page tables of neighbouring rows: arguments of one kernel."""

    offsets: Tensor  # [B + 1] start of each row's pages in `ids`, and the end of the last row's
    last_lens: Tensor  # [B] tokens in each row's last page
    ids: Tensor  # [N] pages of all rows, row by row


@dataclass(frozen=True, slots=True)
class PageLists:
    """int32 in one piece: offsets [B + 1] | last page lengths [B] | page ids [N]."""

    numbers: Tensor
    num_rows: int

    @classmethod
    def of(
        cls, batch: ForwardBatch, first: int, last: int, *, before: int = 0, after: int = 0
    ) -> PageLists:
        """Create from the rows [first, last): the pages of their contexts.

        `before` and `after` padding rows are added: each has one token in page 0.
        """
        written: list[np.ndarray] = []

        def take(size: int) -> np.ndarray:
            written.append(np.empty(size, dtype=np.int32))
            return written[0]

        write_page_lists(batch, (first, last), take, before=before, after=after)
        return cls(torch.from_numpy(written[0]), before + last - first + after)

    @classmethod
    def padding(cls, num_rows: int) -> PageLists:
        """Create padding rows with one token each, in page 0."""
        offsets, ones = np.arange(num_rows + 1), np.ones(num_rows)
        numbers = np.concatenate([offsets, ones, np.zeros(num_rows)]).astype(np.int32)
        return cls(torch.from_numpy(numbers), num_rows)

    def pinned(self) -> PageLists:
        """Return a copy in pinned memory, which can be sent to a GPU without blocking."""
        return PageLists(self.numbers.pin_memory(), self.num_rows)

    def rows(self, first: int, last: int) -> RowLists:
        """Return views of the rows [first, last)."""
        count = self.num_rows
        return RowLists(
            self.numbers[first : last + 1],
            self.numbers[count + 1 + first : count + 1 + last],
            self.numbers[2 * count + 1 :],
        )

    @property
    def all_rows(self) -> RowLists:
        """Return views of all rows."""
        return self.rows(0, self.num_rows)


def list_words(num_rows: int, pages_each: int) -> int:
    """Return the maximum size of the lists of so many rows."""
    return 2 * num_rows + 1 + num_rows * pages_each


class HostLists(NamedTuple):
    """Inputs of plans, int32 on the host."""

    offsets: np.ndarray  # [B + 1] as in `RowLists`
    context_lens: np.ndarray  # [B]


def write_page_lists(
    batch: ForwardBatch,
    rows: tuple[int, int],
    take: Callable[[int], np.ndarray],
    *,
    before: int = 0,
    after: int = 0,
) -> HostLists:
    """Write `PageLists.of` a batch's rows [first, last) to int32 numbers; `take(n)` returns room
    for n.
    """
    first, last = rows
    used = batch.row_pages
    if used is None or last - first < len(batch.pages):
        used = RowPages.of(batch.page_size, batch.pages[first:last], batch.context_lens[first:last])
    num_rows = before + last - first + after
    inner = slice(before, num_rows - after)
    lengths, counts = np.ones((2, num_rows), dtype=np.int32)
    lengths[inner], counts[inner] = used.context_lens, used.counts
    start = 2 * num_rows + 1
    numbers = take(start + before + len(used.ids) + after)
    offsets = numbers[: num_rows + 1]
    offsets[0] = 0
    np.cumsum(counts, out=offsets[1:])
    numbers[num_rows + 1 : start] = lengths - (counts - 1) * batch.page_size
    numbers[start : start + before] = 0
    numbers[start + before : len(numbers) - after] = used.ids
    numbers[len(numbers) - after :] = 0
    return HostLists(offsets, lengths)
