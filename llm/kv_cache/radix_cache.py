"""`RadixCache`: a tree of full KV pages, which stores the KV of prompts for reuse.

One node is one page; the edge to it is the tuple of the page's token ids, so a path from the root
spells a prefix. Each cache salt has a root of its own. After SGLang's RadixAttention
(arXiv:2312.07104), with pages for edges.

    salt "" ── (1,2,3,4) p7 ──┬── (5,6,7,8) p2          locks 2 ──┬── locks 1
                              └── (5,6,7,9) p9                    └── locks 0 → may be evicted

A claim locks every node on its path, so a locked node's ancestors are locked too and the
unlocked nodes are exactly those that eviction, leaf by leaf, can free.

With a `HostStore`, an evicted page goes to host memory, and its node stays: the upper part of the
tree is on the device, and below it hang the parts that are on the host. What does not fit on the
host is dropped, again leaf by leaf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from llm.kv_cache.host_slots import HostSlots, HostStore
from llm.kv_cache.page_node import LeafQueue, PageNode
from llm.kv_cache.page_pool import PADDING_PAGE, PagePool
from llm.request import Token


class RadixCache:
    """Cached pages by the tokens that lead to them. Holds one reference to each page in the
    pool.
    """

    def __init__(self, pool: PagePool, host: HostStore | None = None) -> None:
        self._pool = pool
        self._host = HostSlots(host)
        self._roots: dict[str, PageNode] = {}
        self._salt_of: dict[PageNode, str] = {}  # the inverse mapping
        self.evictable_pages = 0
        """Number of device pages that no claim uses."""
        self._num_pages = 0
        self._clock = 0
        self._leaves = LeafQueue(PageNode.can_leave_device)
        self._host_leaves = LeafQueue(PageNode.can_leave_host)

    @property
    def num_pages(self) -> int:
        """Number of device pages in the tree."""
        return self._num_pages

    @property
    def host(self) -> HostSlots:
        """The part of the tree in host memory."""
        return self._host

    def match(self, salt: str, token_ids: Sequence[Token], max_pages: int) -> list[PageNode]:
        """Return the longest cached path for these tokens, at most `max_pages` nodes; locks
        nothing.

        Nodes on the device come first, then nodes on the host.
        """
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
        """Lock these nodes, a path from the root, against eviction."""
        tick = self._tick()
        for node in path:
            if node.locks == 0 and node.is_on_device:
                self.evictable_pages -= 1
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
                self.evictable_pages += 1
                self._leaves.push(node)

    def insert(
        self, salt: str, parent: PageNode | None, key: tuple[Token, ...], page: int
    ) -> PageNode:
        """Return the child of `parent` (None: the salt's root) for `key`; it is not locked.

        When the device has that prefix already, its page stays and `page` is not taken.
        """
        above = parent if parent is not None else self._roots.get(salt)
        if above is None:
            above = self._roots[salt] = PageNode((), PADDING_PAGE, None, self._tick())
            self._salt_of[above] = salt
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = PageNode(key, PADDING_PAGE, above, self._tick())
        if not node.is_on_device:
            self._pool.retain((page,))
            self._put_on_device(node, page)
        return node

    def restore(self, path: Sequence[PageNode], pages: Sequence[int]) -> None:
        """Copy locked nodes from the host into pages that the caller has allocated for them."""
        for node, page in zip(path, pages, strict=True):
            self._host.load(node, page)
            self._put_on_device(node, page)

    def _put_on_device(self, node: PageNode, page: int) -> None:
        self._host.forget(node)
        node.page = page
        self._num_pages += 1
        if node.locks == 0:
            self.evictable_pages += 1
        assert node.parent is not None
        node.parent.num_on_device += 1
        self._leaves.push(node)

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used leaves first; return how many were
        freed.
        """
        freed = 0
        while freed < count:
            node = self._leaves.pop()
            if node is None:
                break
            self._leave_device(node)
            freed += 1
        return freed

    def _leave_device(self, node: PageNode) -> None:
        parent = node.parent
        assert parent is not None
        goes_to_host = self._make_room_on_host()
        if goes_to_host:
            self._host.save(node)
        self._pool.free((node.page,))
        node.page = PADDING_PAGE
        self._num_pages -= 1
        self.evictable_pages -= 1
        parent.num_on_device -= 1
        if goes_to_host:
            self._host_leaves.push(node)
        else:
            self._remove(node)
        self._leaves.push(parent)

    def _make_room_on_host(self) -> bool:
        """Whether one more page fits after the least recently used page on the host was dropped."""
        if not self._host.is_full:
            return True
        # None: claims hold all host pages (or there is no host), and this node has no descendants
        # there.
        oldest = self._host_leaves.pop()
        if oldest is None:
            return False
        self._host.forget(oldest)
        self._remove(oldest)
        return True

    def _remove(self, node: PageNode) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self._host_leaves.discard(node)
        if parent.parent is not None:
            self._host_leaves.push(parent)
        elif not parent.children:
            del self._roots[self._salt_of.pop(parent)]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def __iter__(self) -> Iterator[PageNode]:
        """Iterate over all nodes, parents first, without the roots, which hold no page."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def check_integrity(self, expected_locks: Counter[PageNode]) -> None:
        """Raise `AssertionError` unless the locks are as expected and all counts are consistent."""
        nodes = list(self)
        if set(expected_locks) - set(nodes):
            raise AssertionError("a claim locks a node that is not in the tree")
        for node in nodes:
            node.check_integrity(expected_locks[node])
            if node.can_leave_device() and node not in self._leaves:
                raise AssertionError(f"{node} can never be evicted")
            if node.can_leave_host() and node not in self._host_leaves:
                raise AssertionError(f"{node} can never be forgotten")
        on_device = [node for node in nodes if node.is_on_device]
        unlocked = sum(node.locks == 0 for node in on_device)
        if (self._num_pages, self.evictable_pages) != (len(on_device), unlocked):
            raise AssertionError(
                f"{self!r}, but the tree has {len(on_device)} pages, {unlocked} unlocked"
            )
        self._host.check_integrity(nodes)
        for queue in (self._leaves, self._host_leaves):
            if len(queue) > len(nodes):
                raise AssertionError(f"{len(queue)} queue entries for {len(nodes)} nodes")

    def __repr__(self) -> str:
        host = f", {self._host!r}" if self._host.num_slots else ""
        return (
            f"RadixCache({self._num_pages} pages, {self.evictable_pages} evictable, "
            f"{len(self._roots)} salts{host})"
        )
