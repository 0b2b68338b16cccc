"""Arguments of paged kernels: contiguous page tables, and scratch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llm.attention.base import AttentionLoad
from llm.attention.gathered import GATHERED_BYTES, MASKED_PAIRS
from llm.attention.page_lists import PageLists, RowLists
from llm.attention.registry import attention_bytes
from llm.attention.workspaces import (
    MAX_FLOAT_BYTES,
    WorkspaceSizes,
    count_processors,
    workspace_bytes,
)
from tests.llm.attention.attention_rows import Row, forward_batch


def test_pages_follow_each_other_row_by_row() -> None:
    """Pages allocated for later tokens are left out."""
    rows = [Row(40, (1, 1), pages, 0) for pages in ([7, 3, 9], [2], [5, 4, 8], [1, 6, 10, 11])]
    ends = (40, 1, 32, 33)
    batch = forward_batch(16, [(row, 0, end) for row, end in zip(rows, ends, strict=True)])
    lists = PageLists.of(batch, 0, 4)
    assert lists.numbers.dtype == torch.int32
    assert listed(lists.all_rows) == ([0, 3, 4, 6, 9], [8, 1, 16, 1], [7, 3, 9, 2, 5, 4, 1, 6, 10])
    some = PageLists.of(batch, 1, 3)
    assert listed(some.all_rows) == ([0, 1, 3], [1, 16], [2, 5, 4])
    padded = PageLists.of(batch, 1, 3, before=2, after=1)
    assert padded.num_rows == 5
    assert listed(padded.all_rows) == ([0, 1, 2, 3, 5, 6], [1, 1, 1, 16, 1], [0, 0, 2, 5, 4, 0])
    last = padded.rows(3, 5)  # of a part, the pages are those of all rows
    assert listed(last) == ([3, 5, 6], [16, 1], [0, 0, 2, 5, 4, 0])
    assert last.ids.data_ptr() == padded.all_rows.ids.data_ptr()


def listed(lists: RowLists) -> tuple[list[int], ...]:
    return tuple(tensor.tolist() for tensor in lists)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_that_pad_have_one_token_in_page_0(num_rows: int) -> None:
    expected = (list(range(num_rows + 1)), [1] * num_rows, [0] * num_rows)
    assert listed(PageLists.padding(num_rows).all_rows) == expected
    padding = PageLists.of(forward_batch(16, []), 0, 0, after=num_rows)
    assert listed(padding.all_rows) == expected


LOAD = AttentionLoad(
    num_rows=8,
    num_tokens=100,
    context_len=100_000,
    expected_len=1000,
    num_layers=3,
    num_kv_heads=2,
    num_groups=4,
    head_dim=16,
    itemsize=2,
    kv_itemsize=1,
)


def test_workspaces_of_kernels_are_known_beforehand() -> None:
    """On a GPU, for each window of the layers."""
    cuda = torch.device("cuda")
    sizes = WorkspaceSizes(8, 2, 4, 16, count_processors(cuda))
    one = attention_bytes("flashinfer", cuda, LOAD)
    assert one == workspace_bytes(sizes, (None, None)) > sizes.float_bytes
    two = attention_bytes("flashinfer", cuda, replace(LOAD, windows=(None, 7, None, 7)))
    assert two - sizes.float_bytes == 2 * (one - sizes.float_bytes)


def test_partial_results_have_no_more_room_than_they_need() -> None:
    """Two tiles of a processor, or all splits of all rows; and never more than the limit."""
    llasa = WorkspaceSizes(256, 8, 4, 64, 132)
    of_row = 8 * 4 * 8 * 66 * 4  # KV heads, queries, splits, values with maximum and sum, bytes
    assert llasa.float_bytes == 264 * 128 * 4 * 66 * 4 > 512 * of_row
    assert llasa._replace(num_rows=1024).float_bytes == 1024 * of_row
    assert llasa._replace(num_rows=1024, num_groups=3).float_bytes == 1024 * of_row
    assert llasa._replace(num_rows=2048).float_bytes == MAX_FLOAT_BYTES


def test_scratch_of_torch_s_attention_is_planned() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    copies, masks = 8 * 1280 * 3 * (2 * 2 * 16), 100 * 1024 * 2
    assert attention_bytes("auto", cpu, LOAD) == copies + masks
    assert attention_bytes("auto", cuda, replace(LOAD, num_layers=0)) == masks
    gathered = GATHERED_BYTES + GATHERED_BYTES // 2  # as stored, and as computed
    pairs = max(MASKED_PAIRS, GATHERED_BYTES // (2 * 2 * 16 * 2))
    assert attention_bytes("gathered", cuda, LOAD) == gathered + pairs * (9 + 2 * 5)
    longer = attention_bytes("gathered", cuda, replace(LOAD, context_len=10**7))
    assert longer == 10**7 * (2 * 2 * 16 * 3 + 9 + 2 * 5)
