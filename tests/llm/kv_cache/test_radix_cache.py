"""Prefix tree: matching, salts, locks and least-recently-used eviction."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.kv_cache.page_node import PageNode
from llm.kv_cache.page_pool import PagePool
from llm.kv_cache.radix_cache import RadixCache

SIZE = 2


class Tree:
    """A cache with a part of the manager: inserts a path of tokens, and records locks."""

    def __init__(self, num_pages: int = 50) -> None:
        self.pool = PagePool(num_pages, SIZE)
        self.cache = RadixCache(self.pool)
        self.locks: Counter[PageNode] = Counter()

    def insert(self, tokens: list[int], salt: str = "") -> list[PageNode]:
        """Cache full pages and leave them locked."""
        path: list[PageNode] = []
        for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
            (page,) = self.pool.alloc(1)
            parent = path[-1] if path else None
            key = tuple(tokens[start : start + SIZE])
            path.append(self.cache.insert(salt, parent, key, page))
            self.cache.lock(path[-1:])
            self.pool.free([page])
        self.locks.update(path)
        return path

    def insert_unlocked(self, tokens: list[int], salt: str = "") -> list[PageNode]:
        path = self.insert(tokens, salt)
        self.unlock(path)
        return path

    def lock(self, path: list[PageNode]) -> None:
        self.cache.lock(path)
        self.locks.update(path)

    def unlock(self, path: list[PageNode]) -> None:
        self.cache.unlock(path)
        self.locks.subtract(path)
        self.locks = +self.locks

    def pages(self, tokens: list[int], salt: str = "", max_pages: int = 99) -> list[int]:
        return [node.page for node in self.cache.match(salt, tokens, max_pages)]

    def check(self) -> None:
        self.cache.check_integrity(self.locks)
        self.pool.check_integrity(Counter(node.page for node in self.cache))


def test_the_longest_cached_path_matches_in_whole_pages() -> None:
    tree = Tree()
    pages = [node.page for node in tree.insert([1, 2, 3, 4, 5, 6])]
    assert tree.pages([1, 2, 3, 4, 5, 6, 7, 8]) == pages
    assert tree.pages([1, 2, 3, 4, 9, 9]) == pages[:2]
    assert tree.pages([1, 2, 3]) == pages[:1]
    assert tree.pages([2, 1]) == []
    assert tree.pages([1, 2, 3, 4, 5, 6], max_pages=2) == pages[:2]
    tree.check()


def test_paths_share_their_common_prefix() -> None:
    tree = Tree()
    first, second = tree.insert([1, 2, 3, 4]), tree.insert([1, 2, 5, 6])
    assert first[0] is second[0]
    assert first[1] is not second[1]
    assert tree.cache.num_pages == 3
    tree.check()


def test_salts_do_not_see_each_other() -> None:
    tree = Tree()
    tree.insert_unlocked([1, 2], "tenant a")
    assert tree.pages([1, 2], "tenant b") == []
    other = tree.insert_unlocked([1, 2], "tenant b")
    assert tree.pages([1, 2], "tenant b") == [other[0].page]
    assert "2 salts" in repr(tree.cache)
    assert tree.cache.evict(2) == 2
    assert repr(tree.cache) == "RadixCache(0 pages, 0 evictable, 0 salts)"
    tree.check()


def test_the_page_cached_first_stays() -> None:
    tree = Tree()
    (first,) = tree.insert([1, 2])
    (page,) = tree.pool.alloc(1)
    again = tree.cache.insert("", None, (1, 2), page)
    assert (again, again.page != page, again.locks) == (first, True, 1)
    assert tree.pool.holders(page) == 1


def test_locked_pages_and_their_ancestors_are_not_evicted() -> None:
    tree = Tree()
    path = tree.insert([1, 2, 3, 4])
    tree.insert_unlocked([1, 2, 7, 8])
    assert tree.cache.evictable_pages == 1
    assert tree.cache.evict(10) == 1
    assert tree.pages([1, 2, 3, 4]) == [node.page for node in path]
    tree.unlock(path)
    assert tree.cache.evict(10) == 2
    tree.check()


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree()
    prompts = [[1, 1, 2, 2], [3, 3], [4, 4]]
    paths = [tree.insert_unlocked(tokens) for tokens in prompts]
    tree.lock(paths[0])
    tree.unlock(paths[0])
    evicted = []
    while tree.cache.num_pages:
        before = {node.key for node in tree.cache}
        tree.cache.evict(1)
        evicted += before - {node.key for node in tree.cache}
        tree.check()
    assert evicted == [(3, 3), (4, 4), (2, 2), (1, 1)]


def test_a_parent_used_later_than_other_leaves_outlives_them() -> None:
    tree = Tree()
    shared = tree.insert_unlocked([1, 1])
    tree.insert_unlocked([1, 1, 2, 2])
    tree.insert_unlocked([5, 5])
    tree.lock(shared)
    tree.unlock(shared)
    tree.cache.evict(2)  # [2, 2] and then [5, 5]; the shared page was used last
    assert tree.pages([1, 1])
    assert not tree.pages([5, 5])


def test_unlocking_twice_is_an_error() -> None:
    tree = Tree()
    path = tree.insert_unlocked([1, 2])
    assert repr(path[0]) == f"PageNode(page {path[0].page}, 0 locks, 0 children)"
    with pytest.raises(ValueError, match="is not locked"):
        tree.cache.unlock(path)


def test_check_integrity_finds_a_lock_without_a_claim() -> None:
    tree = Tree()
    path = tree.insert([1, 2])
    with pytest.raises(AssertionError, match="0 locks expected"):
        tree.cache.check_integrity(Counter())
    tree.unlock(path)
    tree.cache.evict(1)
    with pytest.raises(AssertionError, match="not in the tree"):
        tree.cache.check_integrity(Counter(path))


PROMPTS = st.lists(st.integers(1, 3), min_size=2, max_size=10)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(["use", "drop", "evict"]), PROMPTS, st.sampled_from("ab")))
)
def test_the_tree_matches_a_plain_dictionary(operations: list[tuple[str, list[int], str]]) -> None:
    """A match equals the longest live prefix, and locked prefixes stay."""
    tree = Tree(num_pages=400)
    known: dict[tuple[str, tuple[int, ...]], PageNode] = {}
    held: list[list[PageNode]] = []
    for verb, tokens, salt in operations:
        if verb == "use":
            path = tree.insert(tokens, salt)
            known |= {(salt, tuple(tokens[: 2 * i + 2])): node for i, node in enumerate(path)}
            held.append(path)
        elif verb == "drop" and held:
            tree.unlock(held.pop(len(tokens) % len(held)))
        elif verb == "evict":
            count, evictable = len(tokens), tree.cache.evictable_pages
            assert tree.cache.evict(count) == min(count, evictable)
            alive = set(tree.cache)
            known = {prefix: node for prefix, node in known.items() if node in alive}
            assert all(node in alive for path in held for node in path)
        expected = []
        for end in range(2, len(tokens) + 1, 2):
            node = known.get((salt, tuple(tokens[:end])))
            if node is None:
                break
            expected.append(node)
        assert tree.cache.match(salt, tokens, 99) == expected
        tree.check()
