"""The memory plan: capacities, and errors with the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm.errors import CapacityError
from llm.memory.plan import MemoryPlan, PageLayout, infer_batch_size

LAYOUT = PageLayout(num_layers=4, page_size=16, num_kv_heads=2, head_dim=8, bytes_per_value=2)
PAGE_BYTES = 2 * 4 * 16 * 2 * 8 * 2


def plan(**options: int | None) -> MemoryPlan:
    sizes = {"available_bytes": 100_000, "weights_bytes": 30_000, "activation_bytes": 10_000}
    return MemoryPlan.create(LAYOUT, **(sizes | options))  # type: ignore[arg-type]


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.page_bytes == PAGE_BYTES == 4096


def test_the_kv_cache_gets_what_is_left() -> None:
    made = plan()
    assert made.num_pages == 60_000 // PAGE_BYTES == 14
    assert made.kv_bytes == 14 * PAGE_BYTES
    assert made.total_bytes == 40_000 + made.kv_bytes <= made.available_bytes
    assert made.max_tokens == 13 * 16  # page 0 is for padding


def test_the_kv_cache_gets_no_more_than_it_can_use() -> None:
    assert plan(max_pages=5).num_pages == 5
    assert plan(max_pages=500).num_pages == 14


def test_an_explicit_number_of_pages_is_taken_as_it_is() -> None:
    assert plan(num_pages=10, max_pages=5).num_pages == 10


def test_recurrent_states_leave_fewer_pages() -> None:
    made = plan(state_bytes=3 * PAGE_BYTES)
    assert made.num_pages == 14 - 3
    assert made.total_bytes == plan().total_bytes
    assert "states 0.0 MiB" in made.describe()
    assert "states" not in plan().describe()
    with pytest.raises(CapacityError, match="memory is insufficient"):
        plan(num_pages=14, state_bytes=3 * PAGE_BYTES)


def test_too_many_pages_are_an_error_with_the_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"15 KV pages of 16 tokens × 4096 bytes .* of 0\.1 MiB"
    ):
        plan(num_pages=15)


@pytest.mark.parametrize("weights_bytes", [200_000, 85_000])
def test_a_model_that_leaves_no_room_is_an_error(weights_bytes: int) -> None:
    with pytest.raises(CapacityError, match="no room for a KV cache of at least 2 pages"):
        plan(weights_bytes=weights_bytes)


def test_an_open_batch_size_leaves_room_for_its_own_scratch() -> None:
    """70,000 bytes for rows that take 3,000 of scratch each, and 20 tokens in 2 pages of 4,096."""

    def plan_for(rows: int) -> MemoryPlan:
        return plan(activation_bytes=3_000 * rows)

    rows = infer_batch_size(plan_for, expected_tokens=20, most=100)
    assert rows == 5
    assert 3_000 * 5 + (1 + 2 * 5) * PAGE_BYTES <= 70_000 < 3_000 * 6 + (1 + 2 * 6) * PAGE_BYTES
    assert plan_for(5).num_pages >= 1 + 2 * 5
    assert infer_batch_size(plan_for, expected_tokens=20, most=4) == 4
    assert infer_batch_size(plan_for, expected_tokens=10_000, most=100) == 1


@given(
    scratch=st.integers(1, 20_000),
    expected=st.integers(1, 300),
    most=st.integers(1, 60),
)
def test_no_other_batch_size_is_better(scratch: int, expected: int, most: int) -> None:
    def plan_for(rows: int) -> MemoryPlan:
        return plan(activation_bytes=scratch * rows)

    def fits(rows: int) -> bool:
        try:
            return rows * -(-expected // 16) <= plan_for(rows).num_pages - 1
        except CapacityError:
            return False

    found = infer_batch_size(plan_for, expected, most)
    assert found == max((rows for rows in range(1, most + 1) if fits(rows)), default=1)
