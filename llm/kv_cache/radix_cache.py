"""`RadixCache`: a tree of full KV pages, so that a prompt used again is not computed again.

One node is one page; the edge to it is the tuple of the page's token ids, so a path from the root
spells a prefix. Each cache salt has a root of its own. After SGLang's RadixAttention
(arXiv:2312.07104), with pages for edges.

    salt "" ── (1,2,3,4) p7 ──┬── (5,6,7,8) p2          locks 2 ──┬── locks 1
                              └── (5,6,7,9) p9                    └── locks 0 → may be evicted

A claim locks every node on its path, so a locked node's ancestors are locked too and the
unlocked nodes are exactly those that eviction, leaf by leaf, can free.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from llm.kv_cache.page_pool import PADDING_PAGE, PagePool


class PageNode:
    """One cached page. `last_used` is a count of tree operations, not a time."""

    __slots__ = ("children", "key", "last_used", "locks", "page", "parent", "queued", "serial")

    def __init__(self, key: tuple[int, ...], page: int, parent: PageNode | None, serial: int):
        self.key = key
        self.page = page
        self.parent = parent
        self.serial = serial
        self.children: dict[tuple[int, ...], PageNode] = {}
        self.locks = 0
        self.last_used = serial
        self.queued = False  # has an entry in the eviction queue, perhaps an outdated one

    def __repr__(self) -> str:
        return f"PageNode(page {self.page}, {self.locks} locks, {len(self.children)} children)"


class RadixCache:
    """Cached pages by the tokens that lead to them. Holds one reference to each in the pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._roots: dict[str, PageNode] = {}
        self._salt_of: dict[PageNode, str] = {}  # the other way round
        self._unlocked = 0
        self._num_pages = 0
        self._clock = 0
        # Unlocked leaves by last use. An entry may be outdated: it is put right when it surfaces,
        # which keeps the queue as small as the tree.
        self._queue: list[tuple[int, int, PageNode]] = []

    @property
    def num_pages(self) -> int:
        """Pages in the tree."""
        return self._num_pages

    @property
    def evictable_pages(self) -> int:
        """Pages of the tree that no claim uses."""
        return self._unlocked

    def match(self, salt: str, token_ids: Sequence[int], max_pages: int) -> list[PageNode]:
        """The longest cached path for these tokens, at most `max_pages` nodes; locks nothing."""
        size = self._pool.page_size
        node = self._roots.get(salt)
        path: list[PageNode] = []
        while node is not None and len(path) < max_pages:
            start = len(path) * size
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is not None:
                path.append(node)
        return path

    def lock(self, path: Sequence[PageNode]) -> None:
        """Keep these nodes, a path from the root, from eviction."""
        tick = self._tick()
        for node in path:
            if node.locks == 0:
                self._unlocked -= 1
            node.locks += 1
            node.last_used = tick

    def unlock(self, path: Sequence[PageNode]) -> None:
        """Undo one `lock` of each node."""
        tick = self._tick()
        for node in reversed(path):
            if node.locks < 1:
                raise ValueError(f"{node} is not locked")
            node.locks -= 1
            node.last_used = tick
            if node.locks == 0:
                self._unlocked += 1
                self._enqueue(node)

    def insert(
        self, salt: str, parent: PageNode | None, key: tuple[int, ...], page: int
    ) -> PageNode:
        """The child of `parent` (None: the salt's root) for `key`; not locked by this.

        When the tree has that prefix already, its own page stays and `page` is not taken.
        """
        above = parent if parent is not None else self._roots.get(salt)
        if above is None:
            above = self._roots[salt] = PageNode((), PADDING_PAGE, None, self._tick())
            self._salt_of[above] = salt
        node = above.children.get(key)
        if node is None:
            self._pool.retain((page,))
            node = above.children[key] = PageNode(key, page, above, self._tick())
            self._num_pages += 1
            self._unlocked += 1
            self._enqueue(node)
        return node

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first; returns how many."""
        freed = 0
        while freed < count and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.locks or node.children:
                continue
            if last_used != node.last_used:
                self._enqueue(node)
                continue
            self._remove(node)
            freed += 1
        return freed

    def _remove(self, node: PageNode) -> None:
        self._pool.free((node.page,))
        self._num_pages -= 1
        self._unlocked -= 1
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.parent is not None:
            if parent.locks == 0:
                self._enqueue(parent)
        elif not parent.children:
            del self._roots[self._salt_of.pop(parent)]

    def _enqueue(self, node: PageNode) -> None:
        if not node.queued and not node.children:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, node.serial, node))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def __iter__(self) -> Iterator[PageNode]:
        """Every node, parents first; roots, which hold no page, are left out."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check_integrity(self, expected_locks: Counter[PageNode]) -> None:
        """Raise `AssertionError` unless locks are as expected and all counts agree."""
        nodes = list(self)
        if set(expected_locks) - set(nodes):
            raise AssertionError("a claim locks a node that is not in the tree")
        for node in nodes:
            assert node.parent is not None
            if node.locks != expected_locks[node]:
                raise AssertionError(f"{node}: {expected_locks[node]} locks expected")
            if node.parent.parent is not None and node.parent.locks < node.locks:
                raise AssertionError(f"{node} is locked more often than its parent")
            if node.parent.children.get(node.key) is not node:
                raise AssertionError(f"{node} is not its parent's child")
            if not (node.locks or node.children or node.queued):
                raise AssertionError(f"{node} can never be evicted")
        unlocked = sum(node.locks == 0 for node in nodes)
        if (self._num_pages, self._unlocked) != (len(nodes), unlocked):
            raise AssertionError(
                f"{self!r}, but the tree has {len(nodes)} pages, {unlocked} unlocked"
            )
        if len(self._queue) > len(nodes):
            raise AssertionError(f"{len(self._queue)} queue entries for {len(nodes)} nodes")

    def __repr__(self) -> str:
        return (
            f"RadixCache({self._num_pages} pages, {self._unlocked} evictable, "
            f"{len(self._roots)} salts)"
        )
