"""`HostSlots`: which slots of host memory hold the pages that left the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from llm.kv_cache.page_node import PageNode


class HostStore(Protocol):
    """Host memory in slots of one page. Copies run in order."""

    @property
    def num_slots(self) -> int: ...

    def save(self, page: int, slot: int, /) -> None:
        """Copy a page of the pool to a slot."""

    def load(self, slot: int, page: int, /) -> None:
        """Copy a slot to a page of the pool."""


class HostSlots:
    """Assigns the slots of a store to nodes; without a store there are none."""

    def __init__(self, store: HostStore | None) -> None:
        self._store = store
        self._free: list[int] = []  # used before; the newest is last
        self._num_touched = 0  # slots below this one have been used before
        self.num_slots = 0 if store is None else store.num_slots
        self.num_saved = 0  # pages copied, since the start
        self.num_loaded = 0

    @property
    def num_used(self) -> int:
        """Number of pages in host memory."""
        return self._num_touched - len(self._free)

    @property
    def is_full(self) -> bool:
        """Whether no slot is free."""
        return self.num_used >= self.num_slots

    def save(self, node: PageNode) -> None:
        """Copy a node's page to a free slot; a slot must be free."""
        assert self._store is not None
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_touched = self._num_touched, self._num_touched + 1
        self._store.save(node.page, slot)
        node.slot = slot
        self.num_saved += 1

    def load(self, node: PageNode, page: int) -> None:
        """Copy a node's slot to a page."""
        assert self._store is not None
        assert node.slot is not None
        self._store.load(node.slot, page)
        self.num_loaded += 1

    def forget(self, node: PageNode) -> None:
        """Free a node's slot, if it has one."""
        if node.slot is not None:
            self._free.append(node.slot)
            node.slot = None

    def check_integrity(self, nodes: Iterable[PageNode]) -> None:
        """Raise `AssertionError` unless each used slot has exactly one of these nodes."""
        used = [node.slot for node in nodes if node.slot is not None]
        slots = [*used, *self._free]
        if sorted(slots) != list(range(self._num_touched)) or self._num_touched > self.num_slots:
            raise AssertionError(f"{self!r}: used {sorted(used)}, free {sorted(self._free)}")

    def __repr__(self) -> str:
        return f"{self.num_used} of {self.num_slots} host slots"
