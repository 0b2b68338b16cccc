"""Rows and slots for a runner without a scheduler: conserved, reused, never allocated twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.kv_cache.token_pools import ReqToTokenPool, TokenToKVPoolAllocator


def test_rows_are_used_again() -> None:
    pool = ReqToTokenPool(2, 8)
    first, second = pool.alloc(), pool.alloc()
    assert {first, second} == {0, 1}
    assert pool.alloc() is None
    name = pool.name(0)
    pool.free(0)
    assert (pool.available_size, pool.alloc()) == (1, 0)
    assert pool.name(0) != name
    for wrong in (5, -1):
        with pytest.raises(ValueError, match="not taken"):
            pool.free(wrong)
    pool.free(1)
    with pytest.raises(ValueError, match="row 1 is not taken"):
        pool.free(1)


@settings(max_examples=60)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    num_pages=st.integers(2, 9),
    turns=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=40),
)
def test_slots_have_one_holder(
    page_size: int, num_pages: int, turns: list[tuple[int, int]]
) -> None:
    """Requests grow and end, in any order; no slot is allocated twice, and none is lost."""
    allocator = TokenToKVPoolAllocator(num_pages, page_size)
    total = allocator.available_size
    assert total == (num_pages - 1) * page_size
    held: dict[int, list[int]] = {}
    for request, num_tokens in turns:
        mine = held.setdefault(request, [])
        if num_tokens == 0:
            allocator.free(mine)
            held[request] = []
            continue
        before = allocator.available_size
        found = allocator.alloc(num_tokens, mine[-1] if mine else None)
        if found is None:
            assert allocator.available_size == before
            continue
        mine += found.tolist()
        assert [slot % page_size for slot in mine] == [n % page_size for n in range(len(mine))]
    slots = [slot for mine in held.values() for slot in mine]
    assert len(set(slots)) == len(slots)
    assert all(page_size <= slot < num_pages * page_size for slot in slots)
    pages = [{slot // page_size for slot in mine} for mine in held.values()]
    assert sum(map(len, pages)) * page_size == total - allocator.available_size
    for mine in held.values():
        allocator.free(torch.tensor(mine[:1], dtype=torch.int64))  # one slot frees its page
        allocator.free(slot for slot in mine if slot // page_size != mine[0] // page_size)
    assert allocator.available_size == total
