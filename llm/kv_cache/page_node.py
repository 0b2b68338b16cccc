"""`PageNode`: one page of the prefix tree, and `LeafQueue`: the nodes that can be evicted next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from llm.kv_cache.page_pool import PADDING_PAGE
from llm.request import Token


class PageNode:
    """One cached page. `last_used` is a count of tree operations, not a time."""

    __slots__ = (
        "children",
        "key",
        "last_used",
        "locks",
        "num_on_device",
        "page",
        "parent",
        "serial",
        "slot",
    )

    def __init__(self, key: tuple[Token, ...], page: int, parent: PageNode | None, serial: int):
        self.key = key
        self.page = page  # PADDING_PAGE while it is not on the device
        self.slot: int | None = None  # slot in host memory, if any
        self.parent = parent
        self.serial = serial
        self.children: dict[tuple[Token, ...], PageNode] = {}
        self.num_on_device = 0  # number of children on the device
        self.locks = 0
        self.last_used = serial

    @property
    def is_on_device(self) -> bool:
        """Whether the node has a page of the pool."""
        return self.page != PADDING_PAGE

    def can_leave_device(self) -> bool:
        """Whether the page can be freed: it is not locked and has no children on the device."""
        return self.is_on_device and not self.locks and not self.num_on_device

    def can_leave_host(self) -> bool:
        """Whether the copy in host memory can be dropped."""
        return self.slot is not None and not self.locks and not self.children

    def check_integrity(self, expected_locks: int) -> None:
        """Raise `AssertionError` unless locks, place and links are consistent."""
        parent = self.parent
        assert parent is not None
        if self.locks != expected_locks:
            raise AssertionError(f"{self}: {expected_locks} locks expected")
        if parent.parent is not None and parent.locks < self.locks:
            raise AssertionError(f"{self} is locked more often than its parent")
        if parent.children.get(self.key) is not self:
            raise AssertionError(f"{self} is not its parent's child")
        if self.is_on_device == (self.slot is not None):
            raise AssertionError(f"{self} is in two places, or in none")
        if self.is_on_device and parent.parent is not None and not parent.is_on_device:
            raise AssertionError(f"{self} is on the device, its parent is not")
        if self.num_on_device != sum(child.is_on_device for child in self.children.values()):
            raise AssertionError(f"{self} miscounts its children on the device")

    def __repr__(self) -> str:
        place = f"page {self.page}" if self.slot is None else f"slot {self.slot}"
        return f"PageNode({place}, {self.locks} locks, {len(self.children)} children)"


class LeafQueue:
    """Queue of evictable nodes, least recently used first.

    Entries may be outdated: they are corrected when popped, so that the queue is never larger than
    the tree.
    """

    def __init__(self, may_go: Callable[[PageNode], bool]) -> None:
        self._may_go = may_go
        self._heap: list[tuple[int, int, PageNode]] = []
        self._members: set[PageNode] = set()

    def push(self, node: PageNode) -> None:
        """Queue a node, if it can be evicted and is not queued yet."""
        if node not in self._members and self._may_go(node):
            self._members.add(node)
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def pop(self) -> PageNode | None:
        """Return the node that was used least recently; None when no node can be evicted."""
        while self._heap:
            last_used, _, node = heapq.heappop(self._heap)
            if node not in self._members:
                continue
            self._members.discard(node)
            if last_used == node.last_used and self._may_go(node):
                return node
            self.push(node)
        return None

    def discard(self, node: PageNode) -> None:
        """Remove a node that no longer exists."""
        self._members.discard(node)

    def __contains__(self, node: object) -> bool:
        return node in self._members

    def __len__(self) -> int:
        return len(self._members)
