"""Decode attention of a few rows: what gathered keys give, at every level, and again in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llm.attention.base import AttentionOptions, PlannedAttention
from llm.attention.few_rows import FewRowsDecode
from llm.attention.gathered import GatheredBackend
from llm.attention.page_lists import PageLists
from llm.batch import ForwardBatch, ForwardMode
from llm.kv_cache.kv_pool import KVPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE = 16


def decode_batch(contexts: list[int]) -> ForwardBatch:
    counts = [-(-context // PAGE) for context in contexts]
    ids = (torch.randperm(sum(counts)) + 1).tolist()
    pages = [tuple(ids.pop() for _ in range(count)) for count in counts]
    numbers = torch.tensor(contexts, device="cuda") - 1
    return ForwardBatch(
        mode=ForwardMode.DECODE,
        request_ids=tuple(map(str, range(len(contexts)))),
        query_lens=(1,) * len(contexts),
        context_lens=tuple(contexts),
        pages=tuple(pages),
        page_size=PAGE,
        input_ids=torch.zeros_like(numbers),
        positions=numbers,
        slot_mapping=torch.zeros_like(numbers),
    )


@pytest.mark.parametrize("heads", [(32, 8, 64), (24, 8, 128), (16, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("contexts", [[1], [300], [4001], [700, 17], [1, 64, 65, 999]])
@pytest.mark.parametrize("window", [None, 100])
def test_decoding(heads: tuple[int, int, int], contexts: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, size = heads
    batch = decode_batch(contexts)
    num_pages = sum(map(len, batch.pages)) + 1
    pool = KVPool(2, num_pages, PAGE, num_kv_heads, size, torch.bfloat16, "cuda")
    for storage in pool.storage:
        storage.normal_()
    query = torch.randn(len(contexts), num_heads, size, device="cuda").bfloat16()
    plain = AttentionOptions(num_heads=num_heads, dtype=torch.bfloat16, windows=(window, window))
    twin = PlannedAttention.create(batch, GatheredBackend(pool, plain))
    expected = [twin.attend_stored(layer, query).double() for layer in (0, 1)]
    host = PageLists.of(batch, 0, len(contexts))
    lists = PageLists(host.numbers.cuda(), host.num_rows)
    found: dict[int, list[Tensor]] = {}
    for level in (0, 1, 2):
        options = AttentionOptions(num_heads, torch.bfloat16, (window, window), None, True, level)
        own = FewRowsDecode(pool, options, lists)
        found[level] = [own.attend(layer, query, window) for layer in (0, 1, 0, 1)]
        assert all(torch.equal(found[level][n], found[level][n + 2]) for n in (0, 1))
    for level in (1, 2):
        assert all(map(torch.equal, found[level], found[0]))
    for got, wanted in zip(found[0], expected, strict=False):
        assert ((got.double() - wanted).norm() / wanted.norm()).item() < 8e-3
