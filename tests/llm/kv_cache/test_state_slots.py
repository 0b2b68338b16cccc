"""Recurrent states: one for each claim, freed with it; and their tensors."""

from __future__ import annotations

from array import array

import pytest
import torch

from llm.batch import ForwardBatch, ForwardMode, RowPages
from llm.errors import ConfigError
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.state_pool import StatePart, StatePool, StateRows, state_bytes
from llm.kv_cache.state_slots import FIRST_STATE, StatePages, StateSlots, state_of


def manager(num_states: int = FIRST_STATE + 2) -> KVCacheManager:
    return KVCacheManager(20, 4, num_states=num_states)


def test_a_claim_holds_a_state_as_long_as_its_pages() -> None:
    kv = manager()
    assert kv.claim("a", range(9)) == kv.claim("b", range(9)) == 0
    held = [state_of(kv.pages(name)) for name in "ab"]
    assert sorted(held) == [FIRST_STATE, FIRST_STATE + 1]
    kv.check_integrity()
    before = repr(kv)
    assert before == "KVCacheManager(2 requests hold 6 of 19 pages, 0 cached, 2 of 2 states in use)"
    assert kv.claim("c", [1]) is None  # there are pages, but no state
    assert repr(kv) == before
    kv.rename("a", "ended")
    assert kv.extend("ended", 17)
    assert state_of(kv.pages("ended")) == held[0]
    kv.release("ended", range(9), 9)
    assert kv.available_states == 1
    assert kv.claim("c", [1]) == 0
    assert state_of(kv.pages("c")) == held[0]
    kv.release("b")
    kv.release("c")
    kv.check_integrity()
    assert (kv.available_states, kv.used_pages) == (2, 0)


def test_pages_of_a_model_with_states_are_not_shared() -> None:
    kv = manager()
    kv.claim("a", range(9))
    kv.commit("a", range(9), 8)
    kv.release("a", range(9), 9)
    assert kv.claim("b", range(9)) == 0
    assert (kv.cached_pages, kv.prefix_hit_tokens) == (0, 0)


def test_without_states_page_tables_are_plain() -> None:
    kv = KVCacheManager(20, 4)
    kv.claim("a", range(9))
    assert type(kv.pages("a")) is array
    assert kv.available_states is None


def test_check_integrity_finds_a_state_in_two_places() -> None:
    kv = manager()
    kv.claim("a", [1])
    kv.claim("b", [2])
    first, second = kv.pages("a"), kv.pages("b")
    assert isinstance(first, StatePages)
    assert isinstance(second, StatePages)
    first.state = second.state
    with pytest.raises(AssertionError, match="2 of 2 states in use"):
        kv.check_integrity()


def test_a_slot_is_freed_once() -> None:
    slots = StateSlots(FIRST_STATE + 1)
    taken = slots.alloc()
    slots.free(taken)
    for wrong in (taken, 0, 1, FIRST_STATE + 1):
        with pytest.raises(ValueError, match="is not taken"):
            slots.free(wrong)
    with pytest.raises(ConfigError, match="num_states=2 must be at least 3"):
        StateSlots(2)


def test_only_padding_has_no_state() -> None:
    assert state_of((0, 0)) == 0
    assert state_of(StatePages.of([4, 5], 7)) == 7
    with pytest.raises(ValueError, match="page tables with a state each"):
        state_of([4, 5])


def forward(query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> ForwardBatch:
    count = sum(query_lens)
    numbers = torch.zeros(count, dtype=torch.int64)
    pages = tuple(StatePages.of([1 + n], 10 + n) for n in range(len(query_lens)))
    names = tuple(map(str, range(len(query_lens))))
    mode = ForwardMode.MIXED
    return ForwardBatch(mode, names, query_lens, context_lens, pages, 16, numbers, numbers, numbers)


def test_the_first_row_of_a_sequence_reads_zeros() -> None:
    rows = StateRows.of(forward((3, 1, 2), (3, 1, 9)))
    assert (rows.read.tolist(), rows.written.tolist()) == ([1, 1, 12], [10, 11, 12])
    assert rows.lengths == (3, 1, 2)
    assert StateRows.of(forward((1, 1), (1, 5))).lengths is None


def test_page_tables_with_states_are_read_like_others() -> None:
    tables = [StatePages.of([3, 9, 4], 2), StatePages.of([7], 3)]
    found = RowPages.of(4, tables, [12, 2])
    assert found.ids.tolist() == [3, 9, 4, 7]
    assert found.counts.tolist() == [3, 1]


def test_the_pool_has_what_the_plan_counts() -> None:
    parts = (StatePart(3, (2, 8), torch.bfloat16), StatePart(2, (4, 4, 4), torch.float32))
    assert state_bytes(parts) == 3 * 16 * 2 + 2 * 64 * 4
    pool = StatePool(parts, 5)
    layers = [pool.layer(0, n) for n in range(3)] + [pool.layer(1, n) for n in range(2)]
    assert sum(layer.nbytes for layer in layers) == pool.nbytes == 5 * state_bytes(parts)
    assert pool.layer(1, 1).shape == (5, 4, 4, 4)
