"""`PagePool`: page ids with reference counts. It is independent of tokens and tensors.

id   0        1 … num_pages-1
     padding  handed out, newest freed first, so that a small load stays in few pages
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llm.errors import ConfigError

PADDING_PAGE = 0  # padded rows write here; never handed out, never freed


class PagePool:
    """Ids of `num_pages` pages (the padding page included) and the reference count of each."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages={num_pages} must be at least 2: page 0 is for padding")
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} must be at least 1")
        self.num_pages = num_pages
        self.total_pages = num_pages - 1
        """Pages that can hold tokens."""
        self.page_size = page_size
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._holders = [0] * num_pages

    @property
    def free_pages(self) -> int:
        """Number of pages without holders."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return the reference count of this page."""
        return self._holders[page]

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages with one holder each. The caller has checked `free_pages`."""
        if count > len(self._free):
            raise IndexError(f"{count} pages requested, {len(self._free)} free")
        if count == 0:
            return []
        pages = self._free[-count:][::-1]
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; all of them must be in use."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is free: it cannot be shared")
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page; a page without references is free again."""
        for page in pages:
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is freed twice")
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def check_integrity(self, expected: Counter[int]) -> None:
        """Raise `AssertionError` unless the reference counts equal `expected`."""
        if len(set(self._free)) != len(self._free):
            raise AssertionError("a page is free twice")
        free = set(self._free)
        if PADDING_PAGE in free or expected[PADDING_PAGE]:
            raise AssertionError("the padding page was handed out")
        for page in range(1, self.num_pages):
            holders = self._holders[page]
            if holders != expected[page]:
                raise AssertionError(f"page {page}: {holders} holders, {expected[page]} expected")
            if (holders == 0) != (page in free):
                raise AssertionError(f"page {page}: {holders} holders, free: {page in free}")

    def __repr__(self) -> str:
        used = self.total_pages - self.free_pages
        return f"PagePool({used}/{self.total_pages} pages of {self.page_size} tokens in use)"
