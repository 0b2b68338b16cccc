"""`PageLists`: the page tables of a batch's rows in one piece, as paged kernels read them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm.batch import ForwardBatch


class RowLists(NamedTuple):
    """The page tables of some neighbouring rows: what one kernel is given."""

    offsets: Tensor  # [B + 1] where each row's pages start in `ids`, and where the last row's end
    last_lens: Tensor  # [B] tokens in each row's last page
    ids: Tensor  # [N] pages, row by row; of all rows


@dataclass(frozen=True, slots=True)
class PageLists:
    """int32 in one piece: offsets [B + 1] | last page lengths [B] | page ids [N]."""

    numbers: Tensor
    num_rows: int

    @classmethod
    def of(
        cls, batch: ForwardBatch, first: int, last: int, *, before: int = 0, after: int = 0
    ) -> PageLists:
        """Of the rows [first, last): the pages that hold their contexts.

        So many rows `before` and `after` them pad: each has one token in page 0.
        """
        size, num_rows = batch.page_size, before + last - first + after
        lengths = np.ones(num_rows, dtype=np.int32)
        lengths[before : num_rows - after] = batch.context_lens[first:last]
        counts = (lengths + (size - 1)) // size
        ids, needed = array("i"), counts[before : num_rows - after].tolist()
        for pages, count in zip(batch.pages[first:last], needed, strict=True):
            ids.extend(pages if len(pages) == count else pages[:count])
        numbers = np.zeros(2 * num_rows + 1 + before + len(ids) + after, dtype=np.int32)
        np.cumsum(counts, out=numbers[1 : num_rows + 1])
        numbers[num_rows + 1 : 2 * num_rows + 1] = lengths - (counts - 1) * size
        numbers[2 * num_rows + 1 + before : len(numbers) - after] = np.frombuffer(ids, np.int32)
        return cls(torch.from_numpy(numbers), num_rows)

    @classmethod
    def padding(cls, num_rows: int) -> PageLists:
        """Of rows with one token each, in page 0."""
        offsets, ones = np.arange(num_rows + 1), np.ones(num_rows)
        numbers = np.concatenate([offsets, ones, np.zeros(num_rows)]).astype(np.int32)
        return cls(torch.from_numpy(numbers), num_rows)

    def pinned(self) -> PageLists:
        """A copy that a GPU can be sent without waiting for it."""
        return PageLists(self.numbers.pin_memory(), self.num_rows)

    def rows(self, first: int, last: int) -> RowLists:
        """Of the rows [first, last): views."""
        count = self.num_rows
        return RowLists(
            self.numbers[first : last + 1],
            self.numbers[count + 1 + first : count + 1 + last],
            self.numbers[2 * count + 1 :],
        )

    @property
    def all_rows(self) -> RowLists:
        """Of every row."""
        return self.rows(0, self.num_rows)
