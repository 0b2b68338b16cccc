"""The SDPA backend over random page tables, against attention written out densely in float64."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from llm.attention.base import AttentionOptions, PlannedAttention
from llm.attention.gathered import GatheredBackend
from llm.attention.registry import create_attention_backend
from llm.attention.sdpa import TILE, SdpaBackend
from llm.batch import ForwardMode
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from tests.closeness import error
from tests.llm.attention.attention_rows import HEAD_DIM, Row, forward_batch, options, shuffled_pages

MAX_ERROR = 1e-5  # of the largest number; float32 against float64 differs by 1e-6


def run(
    backend: SdpaBackend, page_size: int, parts: list[tuple[Row, int, int]], layer: int = 0
) -> list[Tensor]:
    """Return the result of each row for its positions [start, end)."""
    planned = PlannedAttention.create(forward_batch(page_size, parts), backend)
    query = torch.cat([row.query[start:end] for row, start, end in parts])
    key_value = torch.cat([row.key_value[start:end] for row, start, end in parts])
    attended = planned.attend(layer, query, key_value)
    return list(attended.split([end - start for _, start, end in parts]))


def create_pool(heads: int, num_pages: int, page_size: int, num_layers: int = 1) -> KVPool:
    return KVPool(num_layers, num_pages, page_size, heads, HEAD_DIM)


def test_layers_are_marked_when_they_are_stored() -> None:
    """By both ways of a layer: one stores its keys and values, the other finds them stored."""
    row = Row(3, (2, 2), [1], 0)
    backend = SdpaBackend(create_pool(2, 4, 16, num_layers=2), options())
    found: list[tuple[int, bool]] = []

    class Marks(LayerMarks):
        def note(self, layer: int) -> None:
            found.append((layer, bool(backend.pool.keys(layer)[1, :3].any())))

    batch = forward_batch(16, [(row, 0, 3)])
    planned = PlannedAttention.create(batch, backend, Marks())
    planned.attend(0, row.query, row.key_value)
    backend.pool.write(1, batch.slot_mapping, row.key_value)
    with suppress(NotImplementedError):  # of this backend: marked nevertheless
        planned.attend_stored(1, row.query)
    assert found == [(0, True), (1, True)]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1), (8, 4)])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_pages_in_any_order_attend_like_dense_memory(
    page_size: int, heads: tuple[int, int]
) -> None:
    """Prefill in chunks in a batch with decode rows; every length around tile and page borders."""
    num_pages = 4 + 700 // page_size
    pages = shuffled_pages(num_pages, seed=page_size)
    lengths = (130, 65, 200)
    rows = []
    for seed, length in enumerate(lengths):
        needed = -(-length // page_size)
        rows.append(Row(length, heads, [pages.pop() for _ in range(needed)], seed))
    backend = SdpaBackend(create_pool(heads[1], num_pages, page_size), options())
    first, second, third = rows
    steps = [
        [(first, 0, 63), (second, 0, 64)],
        [(first, 63, 64), (second, 64, 65), (third, 0, 1)],
        [(first, 64, 128), (third, 1, 150)],
        *[[(third, n, n + 1), (first, n - 22, n - 21)] for n in range(150, 152)],
        [(third, 152, 200)],
    ]
    for parts in steps:
        for found, (row, start, end) in zip(run(backend, page_size, parts), parts, strict=True):
            expected = row.expected(start, end)
            assert error(found, expected) < MAX_ERROR, (row.request_id, start)


def history(
    row: Row,
    cuts: list[int],
    page_size: int,
    num_pages: int,
    asked: AttentionOptions | None = None,
) -> Tensor:
    """Return all results of a row alone, fed in pieces."""
    pool = create_pool(row.key_value.shape[2], num_pages, page_size)
    backend = SdpaBackend(pool, asked or options())
    parts = [run(backend, page_size, [(row, a, b)])[0] for a, b in itertools.pairwise(cuts)]
    return torch.cat(parts)


def test_chunks_pages_and_neighbours_change_no_bit() -> None:
    length, page_size, heads = 150, 16, (4, 2)
    in_order = Row(length, heads, list(range(1, 11)), seed=5)
    whole = history(in_order, [0, length], page_size, 40)
    assert error(whole, in_order.expected(0, length)) < MAX_ERROR
    for cuts in ([0, 1, 2, 63, 64, 65, 130, 150], [0, 70, *range(71, 151)]):
        assert torch.equal(history(in_order, cuts, page_size, 40), whole)
    scattered = Row(length, heads, shuffled_pages(40, seed=1)[:10], seed=5)
    for cuts in ([0, length], [0, 70, *range(71, 151)], [0, 100, 130, 150]):
        assert torch.equal(history(scattered, cuts, page_size, 40), whole)
    backend = SdpaBackend(create_pool(2, 400, page_size), options())
    rows = [Row(length, heads, [r * 10 + k + 1 for k in range(10)], r) for r in range(32)]
    run(backend, page_size, [(row, 0, 149) for row in rows])
    together = run(backend, page_size, [(row, 149, 150) for row in rows])
    assert torch.equal(together[5], whole[149:])


@pytest.mark.parametrize("window", [1, 5, 63, 64, 65, 129, 500])
def test_a_window_hides_what_is_older(window: int) -> None:
    """Pages in order and not; whole, in chunks and token by token: the same bits."""
    length, page_size, heads = 260, 16, (4, 2)
    in_order = Row(length, heads, list(range(1, 18)), seed=6)
    whole = history(in_order, [0, length], page_size, 40, options(window))
    assert error(whole, in_order.expected(0, length, window)) < MAX_ERROR
    scattered = Row(length, heads, shuffled_pages(40, seed=2)[:17], seed=6)
    for cuts in ([0, 1, 70, *range(127, 131), 200, length], [0, 100, *range(101, 261)]):
        for row in (in_order, scattered):
            assert torch.equal(history(row, cuts, page_size, 40, options(window)), whole)


def test_layers_have_their_own_windows() -> None:
    """Each layer of one forward attends within its window, and to no earlier key."""
    page_size, windows = 16, (70, None, 20)
    pool = create_pool(2, 40, page_size, num_layers=3)
    backend = create_attention_backend("sdpa", pool, AttentionOptions(4, torch.float32, windows))
    assert isinstance(backend, SdpaBackend)
    row = Row(200, (4, 2), shuffled_pages(40, seed=4)[:13], seed=9)
    for start, end in ((0, 150), (150, 151), (151, 152), (152, 200)):
        planned = PlannedAttention.create(forward_batch(page_size, [(row, start, end)]), backend)
        for layer, window in enumerate(windows):
            found = planned.attend(layer, row.query[start:end], row.key_value[start:end])
            expected = row.expected(start, end, window)
            assert error(found, expected) < MAX_ERROR, (layer, start)


def test_a_copied_context_grows_and_is_gathered_again_when_it_must() -> None:
    """Rows that decode past the reserved room, that pause, and that lose their pages."""
    page_size, heads = 16, (2, 1)
    pages = shuffled_pages(60, seed=3)
    row, free = Row(700, heads, pages[:44], seed=7), pages[44:]
    backend = SdpaBackend(create_pool(1, 60, page_size), options())
    run(backend, page_size, [(row, 0, 250)])
    decoded = [run(backend, page_size, [(row, n, n + 1)])[0] for n in range(250, 640)]
    assert error(torch.cat(decoded), row.expected(250, 640)) < MAX_ERROR
    other = Row(3, heads, free[:1], seed=8)
    for n in range(3):  # meanwhile the row's copy is dropped
        run(backend, page_size, [(other, n, n + 1)])
    row.pages = [*row.pages[:40], *free[1:5]]  # pages not yet used may change
    found = run(backend, page_size, [(row, 640, 641)])[0]
    assert error(found, row.expected(640, 641)) < MAX_ERROR
    moved = Row(700, heads, row.pages[::-1], seed=7)  # preempted: same request, other pages
    moved.request_id = row.request_id
    run(backend, page_size, [(moved, 0, 600)])
    found = run(backend, page_size, [(moved, 600, 601)])[0]
    assert error(found, row.expected(600, 601)) < MAX_ERROR


def test_rows_do_not_attend_to_keys_of_others() -> None:
    page_size, heads = 16, (2, 2)
    pool = create_pool(2, 8, page_size)
    for storage in pool.storage:
        storage.fill_(1e4)  # values of earlier requests, up to and past the last page
    row = Row(20, heads, [6, 7], seed=1)
    found = run(SdpaBackend(pool, options()), page_size, [(row, 0, 20)])[0]
    assert error(found, row.expected(0, 20)) < MAX_ERROR


def test_only_the_rows_slots_are_written() -> None:
    page_size = 4
    pool = create_pool(1, 6, page_size, num_layers=2)
    row = Row(6, (1, 1), [4, 2], seed=1)
    run(SdpaBackend(pool, options()), page_size, [(row, 0, 6)], layer=1)
    assert all((pool.keys(0) == 0).flatten())
    keys, values = pool.keys(1), pool.values(1)
    assert keys.shape == (6, page_size, 1, HEAD_DIM)
    assert torch.equal(keys[4], row.key_value[:4, 0])
    assert torch.equal(values[2, :2], row.key_value[4:, 1])
    written = (keys != 0).any(dim=3).any(dim=2)
    assert written.sum() == 6


def test_keys_may_be_narrower_than_queries() -> None:
    pool = KVPool(1, 8, 16, 2, HEAD_DIM, dtype=torch.bfloat16)
    assert pool.nbytes == 2 * 8 * 16 * 2 * HEAD_DIM * 2
    row = Row(80, (4, 2), [3, 1, 2, 6, 5], seed=1)
    found = run(SdpaBackend(pool, options()), 16, [(row, 0, 80)])[0]
    assert found.dtype == torch.float32
    # bfloat16 has 8 bits: stored keys and values have errors of up to 1 / 512.
    assert error(found, row.expected(0, 80)) < 0.02
    assert "8 pages of 16 tokens" in repr(pool)


def test_a_plan_advances_by_one_token() -> None:
    page_size = 4
    row = Row(9, (2, 1), [5, 1, 3], seed=2)
    backend = SdpaBackend(create_pool(1, 6, page_size), options())
    run(backend, page_size, [(row, 0, 7)])
    planned = PlannedAttention.create(forward_batch(page_size, [(row, 7, 8)]), backend)
    planned.attend(0, row.query[7:8], row.key_value[7:8])
    advanced = planned.advanced(torch.tensor([11], dtype=torch.int32))
    batch = advanced.forward_batch
    assert (batch.mode, batch.context_lens, batch.query_lens) == (ForwardMode.DECODE, (9,), (1,))
    assert batch.input_ids.tolist() == [11]
    assert batch.positions.tolist() == [8]
    assert batch.slot_mapping.tolist() == [3 * page_size]
    found = advanced.attend(0, row.query[8:9], row.key_value[8:9])
    assert error(found, row.expected(8, 9)) < MAX_ERROR


def test_the_number_of_cached_views_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm.attention.sdpa.MAX_CACHED_VIEWS", 5)
    backend = SdpaBackend(create_pool(1, 40, TILE), options())
    for page in range(1, 30):
        row = Row(3, (1, 1), [page], seed=page)
        found = run(backend, TILE, [(row, 0, 3)])[0]
        assert error(found, row.expected(0, 3)) < MAX_ERROR
    assert len(backend._pool_views) <= 5


def test_backends_are_named() -> None:
    pool = create_pool(1, 2, 4)
    assert isinstance(create_attention_backend("sdpa", pool, options()), SdpaBackend)
    assert isinstance(create_attention_backend("gathered", pool, options()), GatheredBackend)
    supported = "no attention backend 'flash'; supported: sdpa, gathered, flashinfer"
    with pytest.raises(ConfigError, match=supported):
        create_attention_backend("flash", pool, options())


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_scores_are_capped(soft_cap: float) -> None:
    """Whole, in chunks and from scattered pages: the same bits."""
    length, page_size, heads = 150, 16, (4, 2)
    asked = options(window=70, soft_cap=soft_cap)
    in_order = Row(length, heads, list(range(1, 11)), seed=5)
    whole = history(in_order, [0, length], page_size, 40, asked)
    expected = in_order.expected(0, length, 70, soft_cap)
    assert error(whole, expected) < MAX_ERROR
    assert error(expected, in_order.expected(0, length, 70)) > 100 * MAX_ERROR
    scattered = Row(length, heads, shuffled_pages(40, seed=1)[:10], seed=5)
    for row in (in_order, scattered):
        assert torch.equal(
            history(row, [0, 1, 63, 100, *range(120, 151)], page_size, 40, asked), whole
        )


def float8_rounded(row: Row) -> Row:
    """Return the row with keys and values rounded to float8_e4m3fn."""
    row.key_value = row.key_value.to(torch.float8_e4m3fn).float()
    return row


@pytest.mark.parametrize("backend_name", ["sdpa", "gathered"])
@pytest.mark.parametrize("pages", [[3, 1, 2, 6, 5], [1, 2, 3, 4, 5]])
def test_pages_of_float8_hold_rounded_keys(backend_name: str, pages: list[int]) -> None:
    """A row in order, read in place, and one in copies: only rounding differs."""
    pool = KVPool(1, 8, 16, 2, HEAD_DIM, dtype=torch.float8_e4m3fn)
    assert pool.nbytes == 2 * 8 * 16 * 2 * HEAD_DIM
    backend = create_attention_backend(backend_name, pool, options())
    row = Row(80, (4, 2), pages, seed=1)
    steps = [(0, 40), (40, 78), (78, 79), (79, 80)]
    found = torch.cat([run(backend, 16, [(row, a, b)])[0] for a, b in steps])
    assert found.dtype == torch.float32
    assert error(found, float8_rounded(row).expected(0, 80)) < MAX_ERROR


@pytest.mark.parametrize("backend_name", ["sdpa", "gathered"])
@pytest.mark.parametrize("pages", [[2, 1], [1, 2]])
def test_values_beyond_float8_are_clamped(backend_name: str, pages: list[int]) -> None:
    pool = KVPool(1, 4, 4, 1, HEAD_DIM, dtype=torch.float8_e4m3fn)
    row = Row(5, (1, 1), pages, seed=2)
    row.key_value[:, 1] = 1e6
    row.key_value[:, 0, 0, 0] = -1e6
    found = run(create_attention_backend(backend_name, pool, options()), 4, [(row, 0, 5)])[0]
    assert torch.allclose(found, torch.full_like(found, 448.0))
    assert float(pool.keys(0)[pages[0]].float().min()) == -448.0
