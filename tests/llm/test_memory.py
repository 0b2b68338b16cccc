"""The memory plan: what fits, and errors that give the numbers."""

from __future__ import annotations

import pytest

from llm.errors import CapacityError
from llm.memory import MemoryPlan, PageLayout

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


def test_too_many_pages_are_an_error_with_the_numbers() -> None:
    with pytest.raises(
        CapacityError, match=r"15 KV pages of 16 tokens × 4096 bytes .* of 0\.1 MiB"
    ):
        plan(num_pages=15)


@pytest.mark.parametrize("weights_bytes", [200_000, 85_000])
def test_a_model_that_leaves_no_room_is_an_error(weights_bytes: int) -> None:
    with pytest.raises(CapacityError, match="no room for a KV cache of at least 2 pages"):
        plan(weights_bytes=weights_bytes)
