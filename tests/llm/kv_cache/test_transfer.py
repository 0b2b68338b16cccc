"""Pages of prompts between two pools: contents, what is cached, and what a claim holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.transfer import PART_BYTES, PageTransfer
from llm.request import Request

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
PROMPT = Request("r", tuple(range(19)))  # four whole pages, and one that is not moved


def side(num_pages: int = 16, dtype: torch.dtype = torch.float32) -> tuple[PageTransfer, KVPool]:
    pool = KVPool(LAYERS, num_pages, PAGE, HEADS, DIM, dtype)
    return PageTransfer(pool, KVCacheManager(num_pages, PAGE), "weights"), pool


def compute(transfer: PageTransfer, pool: KVPool, request: Request = PROMPT) -> None:
    """Fill a prompt's pages with values of their own and cache them, as an engine does."""
    kv = transfer._kv
    kv.claim(request.request_id, request.prompt_ids, cache_salt=request.cache_namespace)
    generator = torch.Generator().manual_seed(7)
    for layer in range(LAYERS):
        for page in kv.pages(request.request_id):
            values = torch.randn(PAGE, 2, HEADS, DIM, generator=generator)
            slots = torch.arange(page * PAGE, (page + 1) * PAGE)
            pool.write(layer, slots, values)
    kv.release(request.request_id, request.prompt_ids, len(request.prompt_ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pages_have_the_same_contents_on_both_sides(dtype: torch.dtype) -> None:
    (one, from_pool), (other, to_pool) = side(16, dtype), side(12, dtype)
    compute(one, from_pool)
    sent = one.claim("sent", PROMPT)
    received = other.claim("received", PROMPT)
    assert sent is not None
    assert received is not None
    assert (len(sent.pages), sent.num_cached) == (4, 4)
    assert (len(received.pages), received.num_cached) == (4, 0)
    for part in (slice(0, 1), slice(1, 4)):
        content = one.read(sent.pages[part])
        assert content.nbytes == len(sent.pages[part]) * one.page_bytes
        other.write(received.pages[part], content)
    for layer in range(LAYERS):
        mine = from_pool.take(layer, torch.tensor(sent.pages)).view(torch.uint8)
        assert torch.equal(
            mine, to_pool.take(layer, torch.tensor(received.pages)).view(torch.uint8)
        )
    one.release(sent, num_read=4)
    other.release(received, num_written=4)
    assert other._kv.claim("r", PROMPT.prompt_ids) == 16
    assert (one._kv.num_sent, other._kv.num_received) == (4, 4)
    one._kv.check_integrity()
    other._kv.check_integrity()


def test_only_written_pages_become_cached() -> None:
    (one, from_pool), (other, _) = side(), side()
    compute(one, from_pool)
    sent, received = one.claim("sent", PROMPT), other.claim("received", PROMPT)
    assert sent is not None
    assert received is not None
    other.write(received.pages[:2], one.read(sent.pages[:2]))
    other.release(received, num_written=2)
    again = other.claim("again", PROMPT)
    assert again is not None
    assert (len(again.pages), again.num_cached) == (4, 2)
    other.release(again)
    other._kv.check_integrity()
    assert other._kv.num_claims == 0


def test_a_claim_waits_for_room_up_to_the_watermark() -> None:
    transfer, _ = side(num_pages=11)  # ten can be claimed
    assert transfer.fits(PROMPT)
    assert not transfer.fits(Request("long", tuple(range(41))))
    first = transfer.claim("first", PROMPT, watermark=0.4)
    assert first is not None, "alone it may exceed the watermark"
    other = Request("o", tuple(range(100, 117)))
    assert transfer.claim("second", other, watermark=0.9) is None
    second = transfer.claim("second", other)
    assert second is not None
    assert transfer._kv.num_transfers == 2
    assert (transfer._kv.prefix_hit_tokens, transfer._kv.prefix_miss_tokens) == (0, 0)
    transfer._kv.check_integrity()
    for claim in (first, second):
        transfer.release(claim)
    assert transfer._kv.available_pages == 10


def test_contents_of_another_size_are_refused() -> None:
    transfer, _ = side()
    claim = transfer.claim("c", PROMPT)
    assert claim is not None
    with pytest.raises(RuntimeError):
        transfer.write(claim.pages[:2], np.zeros(transfer.page_bytes, np.uint8))


def test_a_part_is_at_least_a_page() -> None:
    transfer, _ = side()
    assert transfer.part_bytes <= PART_BYTES < transfer.part_bytes + transfer.page_bytes
    large = KVPool(1, 2, 1024, 8, 512)
    assert PageTransfer(large, KVCacheManager(2, 1024), "").part_pages == 1
