"""Token slots by request, for a runner that is used without a pipeline.

    ReqToTokenPool            row r │ slot of token 0 │ slot of token 1 │ …   one for each request
    TokenToKVPoolAllocator    slots, handed out in whole pages; slot = page × page_size + offset

A pipeline's pages are the `KVCacheManager`'s instead: a pool of keys and values has one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from llm.kv_cache.page_pool import PagePool


class ReqToTokenPool:
    """Table [requests, tokens] int32 of the slot of each token. Lengths are not stored."""

    def __init__(self, num_requests: int, max_length: int) -> None:
        self.table = torch.zeros(num_requests, max_length, dtype=torch.int32)
        self._free = list(range(num_requests - 1, -1, -1))
        self._uses = [0] * num_requests

    @property
    def available_size(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def alloc(self) -> int | None:
        """Return a free row; None when all rows are in use."""
        if not self._free:
            return None
        row = self._free.pop()
        self._uses[row] += 1
        return row

    def free(self, row: int) -> None:
        """Release a row, which may be allocated again at once. Raises `ValueError` for a free
        row.
        """
        if row in self._free or not 0 <= row < len(self._uses):
            raise ValueError(f"row {row} is not taken")
        self._free.append(row)

    def name(self, row: int) -> str:
        """Return a name that differs between successive requests of the same row."""
        return f"row {row}, use {self._uses[row]}"


class TokenToKVPoolAllocator:
    """Slots of a pool of `num_pages` pages; those of page 0 are for padding and never allocated.

    A page belongs to one request. Freeing any of its slots frees all of it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._pages = PagePool(num_pages, page_size)
        self.page_size = page_size

    @property
    def available_size(self) -> int:
        """Number of slots in free pages."""
        return self._pages.free_pages * self.page_size

    def alloc(self, num_tokens: int, last_slot: int | None = None) -> Tensor | None:
        """Allocate int64 [num_tokens] slots that follow `last_slot` of the same request.

        Returns None, and allocates nothing, when there are too few pages.
        """
        slots: list[int] = []
        if last_slot is not None and (last_slot + 1) % self.page_size:
            end = (last_slot // self.page_size + 1) * self.page_size
            slots += range(last_slot + 1, min(end, last_slot + 1 + num_tokens))
        missing = -(-(num_tokens - len(slots)) // self.page_size)
        if missing > self._pages.free_pages:
            return None
        for page in self._pages.alloc(missing):
            slots += range(page * self.page_size, (page + 1) * self.page_size)
        return torch.tensor(slots[:num_tokens], dtype=torch.int64)

    def free(self, slots: Tensor | Iterable[int]) -> None:
        """Free every page that contains one of the slots."""
        numbers = slots.tolist() if isinstance(slots, Tensor) else slots
        self._pages.free(sorted({slot // self.page_size for slot in numbers}))
