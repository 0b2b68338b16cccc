"""The gathered backend: dense attention's results, with new plans and with captured ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm.attention.base import CapturedShape, PlannedAttention
from llm.attention.gathered import MAX_CAPTURED_TOKENS, GatheredBackend, GatheredPlan
from llm.attention.sdpa import SdpaBackend
from llm.kv_cache.kv_pool import KVPool
from tests.closeness import error
from tests.llm.attention.attention_rows import HEAD_DIM, Row, forward_batch, options, shuffled_pages

MAX_ERROR = 1e-5  # of the largest number; float32 against float64 differs by 1e-6

Step = list[tuple[Row, int, int]]


def fed(parts: Step) -> tuple[Tensor, Tensor]:
    query = torch.cat([row.query[start:end] for row, start, end in parts])
    return query, torch.cat([row.key_value[start:end] for row, start, end in parts])


def expected(parts: Step, window: int | None = None) -> Tensor:
    return torch.cat([row.expected(start, end, window) for row, start, end in parts])


def padded(rows: int) -> Row:
    """Return a padding row: a single token in page 0."""
    return Row(1, (4, 2), [0], seed=1000 + rows)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1)])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_mixed_batches_attend_like_dense_memory(
    page_size: int, heads: tuple[int, int], window: int | None
) -> None:
    """Chunks in a batch with decode rows, and one more token after a cached prefix."""
    pages = shuffled_pages(4 + 400 // page_size, seed=page_size)
    rows = []
    for seed, length in enumerate((130, 65, 150)):
        rows.append(Row(length, heads, [pages.pop() for _ in range(-(-length // page_size))], seed))
    first, second, third = rows
    pool = KVPool(1, 4 + 400 // page_size, page_size, heads[1], HEAD_DIM)
    backend = GatheredBackend(pool, options(window))
    steps: list[Step] = [
        [(first, 0, 63), (second, 0, 63)],
        [(first, 63, 64), (second, 63, 65), (third, 0, 1)],
        [(third, 1, 149), (first, 64, 65)],
        [(third, 149, 150), (first, 65, 66)],
    ]
    for parts in steps:
        planned = PlannedAttention.create(forward_batch(page_size, parts), backend)
        found = planned.attend(0, *fed(parts))
        assert error(found, expected(parts, window)) < MAX_ERROR


def addresses(plan: GatheredPlan) -> list[int]:
    tensors = [plan.slots]
    for part in plan.parts:
        tensors += [
            part.page_table,
            part.positions,
            *([] if part.firsts is None else [part.firsts]),
        ]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("window", [None, 7])
def test_a_captured_plan_is_pointed_at_other_rows(window: int | None) -> None:
    """Contexts that shrink and grow, and padding rows: every tensor stays in place."""
    page_size, heads = 4, (4, 2)
    pages = shuffled_pages(60, seed=2)
    rows = [Row(50, heads, pages[13 * n : 13 * (n + 1)], seed=n) for n in range(4)]
    backend = GatheredBackend(KVPool(1, 60, page_size, 2, HEAD_DIM), options(window))
    filled = [(row, 0, 50) for row in rows]
    PlannedAttention.create(forward_batch(page_size, filled), backend).attend(0, *fed(filled))

    plan = backend.capture_plan(CapturedShape(3), max_context=50)
    before = addresses(plan)
    steps: list[Step] = [
        [(rows[0], 49, 50), (rows[1], 20, 21), (rows[2], 0, 1)],
        [(rows[3], 10, 11), (rows[0], 4, 5), (padded(1), 0, 1)],
        [(rows[2], 48, 49), (padded(2), 0, 1), (padded(3), 0, 1)],
    ]
    for parts in steps:
        backend.replan(plan, forward_batch(page_size, parts))
        found = backend.forward(plan, 0, *fed(parts))
        real = [part for part in parts if part[0].pages != [0]]
        assert error(found[: len(real)], expected(real, window)) < MAX_ERROR
        assert bool(found.isfinite().all())
        assert addresses(plan) == before


@pytest.mark.parametrize("window", [None, 7])
def test_a_captured_plan_with_prompts(window: int | None) -> None:
    """Prompts, chunks and single rows share its tokens; every tensor stays in place."""
    page_size, heads, shape = 4, (4, 2), CapturedShape(3, 2, 30)
    pages = shuffled_pages(60, seed=2)
    rows = [Row(50, heads, pages[13 * n : 13 * (n + 1)], seed=n) for n in range(4)]
    backend = GatheredBackend(KVPool(1, 60, page_size, 2, HEAD_DIM), options(window))
    plan = backend.capture_plan(shape, max_context=50)
    before = addresses(plan)
    a, b, c, d = rows
    steps: list[Step] = [
        [(a, 0, 9), (b, 0, 21)],
        [(a, 9, 10), (b, 21, 40)],  # one of one token, and a chunk behind a prefix
        [(b, 40, 41), (a, 10, 11), (c, 0, 14), (d, 0, 1)],
        [(c, 14, 15), (a, 11, 12), (b, 41, 42)],
        [(d, 1, 13), (a, 12, 13)],
    ]
    for parts in steps:
        singles = next((n for n, part in enumerate(parts) if part[2] > part[1] + 1), len(parts))
        first, query, key_value = shape.first_token(singles), *fed(parts)
        size, rest = len(query), shape.num_tokens - len(query) - first
        around = (0, 0, 0, 0, first, rest)
        backend.replan(plan, forward_batch(page_size, parts))
        padded = torch.nn.functional.pad(key_value, (0, 0, *around), value=0.5)
        found = backend.forward(plan, 0, torch.nn.functional.pad(query, around), padded)
        assert bool(found.isfinite().all())
        own = found[first : first + size]
        assert error(own, expected(parts, window)) < MAX_ERROR
        assert addresses(plan) == before


def test_a_fresh_captured_plan_only_pads() -> None:
    pool = KVPool(1, 4, 4, 2, HEAD_DIM)
    backend = GatheredBackend(pool, options())
    row = padded(1)
    found = backend.forward(
        backend.capture_plan(CapturedShape(2), 9), 0, *fed([(row, 0, 1), (row, 0, 1)])
    )
    assert bool(found.isfinite().all())
    assert bool((pool.keys(0)[1:] == 0).all())


def test_capture_errors() -> None:
    backend = SdpaBackend(KVPool(1, 4, 4, 2, HEAD_DIM), options())
    assert not backend.can_capture
    with pytest.raises(NotImplementedError, match="SdpaBackend cannot be captured"):
        backend.capture_plan(CapturedShape(1), 4)
    with pytest.raises(NotImplementedError, match="SdpaBackend cannot be captured"):
        backend.replan(backend.plan(forward_batch(4, [(padded(1), 0, 1)])), forward_batch(4, []))


def test_keys_and_values_stored_by_another_hand() -> None:
    """A kernel may write the slots itself, except with a backend that keeps copies."""
    row = Row(20, (4, 2), [2, 1, 3], seed=9)
    pool = KVPool(1, 4, 8, 2, HEAD_DIM)
    parts: Step = [(row, 0, 20)]
    planned = PlannedAttention.create(forward_batch(8, parts), GatheredBackend(pool, options()))
    query, key_value = fed(parts)
    target = planned.slots(0)
    assert target is not None
    pages, offsets = target.slots // 8, target.slots % 8
    target.keys[pages, offsets], target.values[pages, offsets] = key_value.unbind(1)
    assert torch.equal(planned.attend_stored(0, query), planned.attend(0, query, key_value))
    other = PlannedAttention.create(forward_batch(8, parts), SdpaBackend(pool, options()))
    assert other.slots(0) is None
    with pytest.raises(NotImplementedError, match="SdpaBackend stores keys and values itself"):
        other.attend_stored(0, query)


def test_much_is_gathered_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many bytes at once, except for a single row."""
    parts: Step = [(Row(20, (4, 2), [2 * n + 1, 2 * n + 2], n), 0, 20) for n in range(5)]
    pool = KVPool(1, 12, 16, 2, HEAD_DIM)
    row_bytes = 20 * 2 * 2 * HEAD_DIM * 4
    for limit, pieces in ((2 * row_bytes, 3), (1, 5), (100 * row_bytes, 1)):
        monkeypatch.setattr("llm.attention.gathered.GATHERED_BYTES", limit)
        planned = PlannedAttention.create(
            forward_batch(16, parts), GatheredBackend(pool, options())
        )
        assert len(planned.plan.parts) == pieces
        found = planned.attend(0, *fed(parts))
        assert error(found, expected(parts)) < MAX_ERROR


def test_long_prompts_are_masked_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many pairs of a query and a key at once, except for a single query."""
    parts: Step = [(Row(20, (4, 2), [2 * n + 1, 2 * n + 2], n), 0, 20) for n in range(3)]
    parts.append((Row(5, (4, 2), [7], 3), 0, 5))
    pool = KVPool(1, 12, 16, 2, HEAD_DIM)
    for limit, pieces in ((2 * 400, 3), (399, 7), (7 * 20, 10), (1, 65)):
        monkeypatch.setattr("llm.attention.gathered.MASKED_PAIRS", limit)
        planned = PlannedAttention.create(
            forward_batch(16, parts), GatheredBackend(pool, options())
        )
        assert len(planned.plan.parts) == pieces
        assert error(planned.attend(0, *fed(parts)), expected(parts)) < MAX_ERROR


def test_a_large_pool_is_not_captured() -> None:
    """Every forward would gather contexts of the greatest length."""
    sizes = {MAX_CAPTURED_TOKENS // 16: True, MAX_CAPTURED_TOKENS // 16 + 1: False}
    for num_pages, can_capture in sizes.items():
        pool = KVPool(1, num_pages, 16, 1, 1)
        assert GatheredBackend(pool, options()).can_capture == can_capture
