"""Page pool: ids are conserved, counted and never allocated twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.errors import ConfigError
from llm.kv_cache.page_pool import PADDING_PAGE, PagePool


def test_all_pages_but_the_padding_page_can_be_allocated() -> None:
    pool = PagePool(num_pages=9, page_size=4)
    pages = pool.alloc(8)
    assert sorted(pages) == list(range(1, 9))
    assert PADDING_PAGE not in pages
    assert (pool.total_pages, pool.free_pages) == (8, 0)
    with pytest.raises(IndexError, match="1 pages requested, 0 free"):
        pool.alloc(1)
    assert pool.alloc(0) == []


def test_a_page_is_free_when_its_last_holder_goes() -> None:
    pool = PagePool(3, 4)
    (page,) = pool.alloc(1)
    pool.retain([page])
    pool.free([page])
    assert (pool.holders(page), pool.free_pages) == (1, 1)
    pool.free([page])
    assert (pool.holders(page), pool.free_pages) == (0, 2)


def test_freeing_twice_and_sharing_a_free_page_are_errors() -> None:
    pool = PagePool(3, 4)
    pages = pool.alloc(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(pages)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.retain(pages)


def test_the_newest_freed_page_is_used_again_first() -> None:
    pool = PagePool(100, 4)
    pages = pool.alloc(10)
    pool.free(pages[4:5])
    assert pool.alloc(1) == pages[4:5]


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (8, 0)])
def test_a_pool_without_room_is_an_error(num_pages: int, page_size: int) -> None:
    with pytest.raises(ConfigError):
        PagePool(num_pages, page_size)


def test_the_smallest_pool_has_one_page_of_one_token() -> None:
    pool = PagePool(num_pages=2, page_size=1)
    assert pool.alloc(1) == [1]


def test_repr_has_the_load() -> None:
    pool = PagePool(9, 4)
    pool.alloc(3)
    assert repr(pool) == "PagePool(3/8 pages of 4 tokens in use)"


def test_check_integrity_finds_a_lost_page() -> None:
    pool = PagePool(9, 4)
    pages = pool.alloc(3)
    pool.check_integrity(Counter(pages))
    with pytest.raises(AssertionError, match="1 holders, 0 expected"):
        pool.check_integrity(Counter(pages[:2]))
    with pytest.raises(AssertionError, match="padding"):
        pool.check_integrity(Counter([PADDING_PAGE, *pages]))
    pool._free.pop()  # now neither free nor held
    with pytest.raises(AssertionError, match="0 holders, free: False"):
        pool.check_integrity(Counter(pages))


@given(st.lists(st.tuples(st.sampled_from(["alloc", "retain", "free"]), st.integers(0, 20))))
def test_pages_are_conserved(operations: list[tuple[str, int]]) -> None:
    pool = PagePool(12, 4)
    held: list[int] = []
    for verb, number in operations:
        if verb == "alloc" and number <= pool.free_pages:
            pages = pool.alloc(number)
            assert not set(pages) & set(held)
            held += pages
        elif verb == "retain" and held:
            held.append(held[number % len(held)])
            pool.retain(held[-1:])
        elif verb == "free" and held:
            pool.free([held.pop(number % len(held))])
        pool.check_integrity(Counter(held))
        assert pool.free_pages == pool.total_pages - len(set(held))
