"""`RowPages`: the pages that hold the contexts of a forward's rows, all of them in one piece."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RowPages:
    """Of B rows. Pages of a table that are there for tokens to come are left out."""

    page_size: int
    context_lens: np.ndarray  # int32 [B], the fed tokens counted
    counts: np.ndarray  # int32 [B] pages of each row
    ids: np.ndarray  # int32 [N], row by row

    @classmethod
    def of(
        cls, page_size: int, pages: Sequence[Sequence[int]], context_lens: Sequence[int]
    ) -> RowPages:
        """From page tables."""
        lengths = np.array(context_lens, dtype=np.int32)
        counts = (lengths + (page_size - 1)) // page_size
        needed = counts.tolist()
        if list(map(len, pages)) == needed and set(map(type, pages)) == {array}:
            joined = b"".join(pages)  # type: ignore[arg-type]  # arrays are buffers
            return cls(page_size, lengths, counts, np.frombuffer(joined, np.int32))
        ids = array("i")
        for table, count in zip(pages, needed, strict=True):
            ids.extend(table if len(table) == count else table[:count])
        return cls(page_size, lengths, counts, np.array(ids, dtype=np.int32))

    def places(self, query_lens: Sequence[int], *, are_single: bool) -> tuple[np.ndarray, ...]:
        """Positions and slots, int64 [T], of the last `query_lens` [B] tokens of each row's
        context; `are_single`: of the last one.
        """
        size, lengths = self.page_size, self.context_lens.astype(np.int64)
        ends = np.cumsum(self.counts, dtype=np.int64)
        if are_single:
            positions, indices = lengths - 1, ends - 1
        else:
            fed = np.array(query_lens, dtype=np.int64)
            before = np.cumsum(fed) - fed  # tokens of the rows before
            positions = np.arange(fed.sum()) + np.repeat(lengths - fed - before, fed)
            indices = np.repeat(ends - self.counts, fed) + positions // size
        return positions, self.ids[indices].astype(np.int64) * size + positions % size
