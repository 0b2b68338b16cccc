"""What paged kernels are given: page tables in one piece, and scratch."""

from __future__ import annotations

import pytest
import torch

from llm.attention.page_lists import PageLists
from llm.attention.workspaces import FLOAT_WORKSPACE_BYTES, workspace_bytes
from tests.llm.attention_rows import Row, forward_batch


def test_pages_follow_each_other_row_by_row() -> None:
    """Pages that are there for tokens to come are left out."""
    rows = [Row(40, (1, 1), pages, 0) for pages in ([7, 3, 9], [2], [5, 4, 8], [1, 6, 10, 11])]
    ends = (40, 1, 32, 33)
    batch = forward_batch(16, [(row, 0, end) for row, end in zip(rows, ends, strict=True)])
    lists = PageLists.of(batch, 0, 4)
    assert lists.numbers.dtype == torch.int32
    assert lists.offsets.tolist() == [0, 3, 4, 6, 9]
    assert lists.last_lens.tolist() == [8, 1, 16, 1]
    assert lists.ids.tolist() == [7, 3, 9, 2, 5, 4, 1, 6, 10]
    some = PageLists.of(batch, 1, 3)
    assert (some.offsets.tolist(), some.last_lens.tolist()) == ([0, 1, 3], [1, 16])
    assert some.ids.tolist() == [2, 5, 4]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_rows_that_pad_have_one_token_in_page_0(num_rows: int) -> None:
    lists = PageLists.padding(num_rows)
    assert lists.offsets.tolist() == list(range(num_rows + 1))
    assert lists.last_lens.tolist() == [1] * num_rows
    assert lists.ids.tolist() == [0] * num_rows


def test_scratch_of_kernels_is_known_beforehand() -> None:
    """On a GPU, for each window that layers have; torch takes what it needs by itself."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert workspace_bytes("auto", cpu, ()) == workspace_bytes("gathered", cuda, ()) == 0
    one = workspace_bytes("auto", cuda, ())
    assert one == workspace_bytes("flashinfer", cuda, (None, None)) > FLOAT_WORKSPACE_BYTES
    two = workspace_bytes("auto", cuda, (None, 7, None, 7))
    assert two - FLOAT_WORKSPACE_BYTES == 2 * (one - FLOAT_WORKSPACE_BYTES)
