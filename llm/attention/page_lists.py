"""`PageLists`: the page tables of a batch's rows in one piece, as paged kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from llm.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PageLists:
    """int32 on the host, in one piece: offsets [B + 1] | last page lengths [B] | page ids [N]."""

    numbers: Tensor
    num_rows: int

    @classmethod
    def of(cls, batch: ForwardBatch, first: int, last: int) -> PageLists:
        """Of the rows [first, last): the pages that hold their contexts."""
        size, num_rows = batch.page_size, last - first
        lengths = np.array(batch.context_lens[first:last], dtype=np.int32)
        counts = (lengths + (size - 1)) // size
        kept = zip(batch.pages[first:last], counts.tolist(), strict=True)
        ids = list(chain.from_iterable([pages[:count] for pages, count in kept]))
        numbers = np.empty(2 * num_rows + 1 + len(ids), dtype=np.int32)
        numbers[0] = 0
        np.cumsum(counts, out=numbers[1 : num_rows + 1])
        numbers[num_rows + 1 : 2 * num_rows + 1] = lengths - (counts - 1) * size
        numbers[2 * num_rows + 1 :] = ids
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

    @property
    def offsets(self) -> Tensor:
        """[B + 1] where each row's pages start in `ids`, then N."""
        return self.numbers[: self.num_rows + 1]

    @property
    def last_lens(self) -> Tensor:
        """[B] tokens in each row's last page."""
        return self.numbers[self.num_rows + 1 : 2 * self.num_rows + 1]

    @property
    def ids(self) -> Tensor:
        """[N] pages, row by row."""
        return self.numbers[2 * self.num_rows + 1 :]
