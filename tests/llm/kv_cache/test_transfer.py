"""Pages of prompts between two pools: contents, what is cached, and what a claim holds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.peer_pool import PeerPool, share_pool
from llm.kv_cache.pool_handle import PoolHandle
from llm.kv_cache.transfer import MOST_CLAIMED, PART_BYTES, PageClaim, PageTransfer
from llm.memory.shared_file import SharedFile
from llm.request import Request

PAGE, LAYERS, HEADS, DIM = 4, 3, 2, 8
PROMPT = Request("r", tuple(range(19)))  # four whole pages, and three tokens of a fifth
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
needs_files = pytest.mark.skipif(not SharedFile.is_available(), reason="needs files in memory")


def side(
    num_pages: int = 24, dtype: torch.dtype = torch.float32, *, is_shared: bool = False
) -> tuple[PageTransfer, KVPool]:
    pool = KVPool(LAYERS, num_pages, PAGE, HEADS, DIM, dtype, is_shared=is_shared)
    return PageTransfer(pool, KVCacheManager(num_pages, PAGE), "weights"), pool


def computed(transfer: PageTransfer, pool: KVPool, request: Request = PROMPT) -> PageClaim:
    """Fill a prompt's pages with values of their own and keep them, as an engine does."""
    kv = transfer._kv
    kv.claim(request.request_id, request.prompt_ids, cache_salt=request.cache_namespace)
    generator = torch.Generator().manual_seed(7)
    for layer in range(LAYERS):
        for page in kv.pages(request.request_id):
            values = torch.randn(PAGE, 2, HEADS, DIM, generator=generator)
            slots = torch.arange(page * PAGE, (page + 1) * PAGE)
            pool.write(layer, slots, values)
    kv.keep(request.request_id, "kept", request.prompt_ids, len(request.prompt_ids))
    return transfer.kept("kept", request)


def contents(pool: KVPool, pages: tuple[int, ...]) -> torch.Tensor:
    return pool.read_pages(torch.tensor(pages)).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_have_the_same_contents_on_both_sides(dtype: torch.dtype) -> None:
    (one, from_pool), (other, to_pool) = side(24, dtype), side(20, dtype)
    sent, received = computed(one, from_pool), other.claim("received", PROMPT)
    assert received is not None
    assert (len(sent.pages), sent.num_cached) == (5, 5)
    assert (len(received.pages), received.num_cached) == (5, 0)
    for part in (slice(0, 1), slice(1, 5)):
        content = one.read(sent.pages[part])
        assert content.nbytes == len(sent.pages[part]) * one.page_bytes
        other.write(received.pages[part], content)
    assert torch.equal(contents(from_pool, sent.pages), contents(to_pool, received.pages))
    one.release(sent, num_read=5)
    other.release(received, num_written=5)
    assert other._kv.claim("r", PROMPT.prompt_ids) == 16
    assert (one._kv.num_sent, other._kv.num_received) == (5, 5)
    one._kv.check_integrity()
    other._kv.check_integrity()


@needs_files
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [1, 2**25])
def test_a_pool_is_written_by_another_one(
    dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llm.kv_cache.peer_pool.COPY_BYTES", most)
    (one, from_pool), (other, to_pool) = side(24, dtype), side(20, dtype, is_shared=True)
    sent, received = computed(one, from_pool), other.claim("received", PROMPT)
    assert received is not None
    handle = other.share()
    assert handle is not None
    before = contents(to_pool, (0, 9, 19))
    peer = one.open_peer(handle)
    one.write_to(peer, received.pages, sent.pages)
    assert torch.equal(contents(from_pool, sent.pages), contents(to_pool, received.pages))
    assert torch.equal(before, contents(to_pool, (0, 9, 19))), "other pages are untouched"
    for pages, own in (((0,), (1,)), ((20,), (1,)), ((-1,), (1,)), ((1, 2), (1,))):
        with pytest.raises(ValueError, match="pages for"):
            one.write_to(peer, pages, own)


class Event:
    """An event that notes when it is recorded and waited for."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def record(self) -> None:
        self._log.append(f"record {self._number}")

    def wait(self) -> None:
        self._log.append(f"wait {self._number}")


def event_maker(log: list[str]) -> Callable[[], Event]:
    numbers = itertools.count()
    return lambda: Event(log, next(numbers))


@needs_files
def test_each_layer_is_written_behind_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without a mark is written behind the end of the forward."""
    monkeypatch.setattr("llm.kv_cache.peer_pool.COPY_BYTES", 1)
    (one, from_pool), (other, to_pool) = side(24), side(20, is_shared=True)
    sent, received = computed(one, from_pool), other.claim("received", PROMPT)
    handle = other.share()
    assert received is not None
    assert handle is not None
    log: list[str] = []
    marks = LayerMarks(event_maker(log))
    for layer in range(from_pool.num_layers - 1):
        marks.note(layer)
    marks.note_end()
    last = from_pool.num_layers - 1
    assert log == [f"record {number}" for number in range(last + 1)]
    log.clear()
    one.write_to(one.open_peer(handle), received.pages, sent.pages, marks)
    assert log == [f"wait {number}" for number in range(last + 1)]
    assert torch.equal(contents(from_pool, sent.pages), contents(to_pool, received.pages))


WRITER = """
import sys, torch
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.peer_pool import PeerPool
from llm.kv_cache.pool_handle import PoolHandle

own = KVPool({layers}, 6, {page}, {heads}, {dim})
for layer in own.storage:
    layer.fill_(7.0)
handle = PoolHandle({num_pages}, sys.argv[1], int(sys.argv[2]))
PeerPool.open(handle, own).write((3, 5), (1, 2))
"""


@needs_files
def test_another_process_writes_a_pool(tmp_path: Path) -> None:
    pool = KVPool(LAYERS, 8, PAGE, HEADS, DIM, is_shared=True)
    handle = share_pool(pool)
    assert handle is not None
    script = WRITER.format(layers=LAYERS, page=PAGE, heads=HEADS, dim=DIM, num_pages=8)
    subprocess.run([sys.executable, "-c", script, handle.file, str(handle.number)], check=True)
    found = pool.read_pages(torch.arange(8)).float()
    assert set(found[:, :, [3, 5]].flatten().tolist()) == {7.0}
    assert set(found[:, :, [0, 1, 2, 4, 6, 7]].flatten().tolist()) == {0.0}


@needs_files
def test_only_the_file_of_a_pool_is_mapped(tmp_path: Path) -> None:
    own = KVPool(LAYERS, 6, PAGE, HEADS, DIM)
    assert share_pool(own) is None, "it is not shared"
    same = KVPool(LAYERS, 6, PAGE, HEADS, DIM, is_shared=True)
    shared = share_pool(same)
    assert shared is not None
    file = tmp_path / "file"
    file.write_bytes(bytes(10))
    with file.open("rb+") as opened:
        for path in (str(file), "/etc/passwd", f"/proc/{os.getpid()}/fd/{opened.fileno()}", ""):
            with pytest.raises(ValueError, match="of a pool"):
                PeerPool.open(PoolHandle(6, path), own)
    other = KVPool(LAYERS, 8, PAGE, HEADS, DIM, is_shared=True)
    found = share_pool(other)
    assert found is not None
    with pytest.raises(ValueError, match="bytes of a pool"):
        PeerPool.open(PoolHandle(6, found.file, found.number), own)
    with pytest.raises(ValueError, match="is no file of a pool"):
        PeerPool.open(PoolHandle(6, shared.file, found.number), own)
    with pytest.raises(FileNotFoundError):
        PeerPool.open(PoolHandle(6, f"/proc/{os.getpid()}/fd/99999"), own)


def test_only_written_pages_become_cached() -> None:
    (one, from_pool), (other, _) = side(), side()
    sent, received = computed(one, from_pool), other.claim("received", PROMPT)
    assert received is not None
    other.write(received.pages[:2], one.read(sent.pages[:2]))
    other.release(received, num_written=2)
    again = other.claim("again", PROMPT)
    assert again is not None
    assert (len(again.pages), again.num_cached) == (5, 2)
    other.release(again)
    other._kv.check_integrity()
    assert other._kv.num_claims == 0


@pytest.mark.parametrize(
    ("length", "num_written", "token", "num_tokens", "known"),
    [(19, 5, 3, 19, 3), (19, 5, None, 18, None), (19, 4, 3, 16, None), (20, 5, None, 19, None)],
)
def test_a_received_prompt_leaves_a_token_to_feed(
    length: int, num_written: int, token: int | None, num_tokens: int, known: int | None
) -> None:
    """Its last token, or the first one that was sampled, if all of its pages are there."""
    transfer, _ = side()
    request = Request("r", tuple(range(length)))
    claim = transfer.claim("c", request)
    assert claim is not None
    assert len(transfer._kv.pages("c")) * PAGE > length, "there is room for the first token"
    received = transfer.received(claim, num_written, token)
    assert (received.num_tokens, received.token) == (num_tokens, known)
    kv = transfer._kv
    kv.adopt("c", "r", request.prompt_ids, num_tokens, num_written)
    kv.check_integrity()
    assert (kv.num_transfers, kv.num_received) == (0, num_written)
    assert (kv.prefix_hit_tokens, kv.prefix_miss_tokens) == (num_tokens, length - num_tokens)
    assert kv.claim("other", request.prompt_ids) == min(num_tokens, length - 1) // PAGE * PAGE
    for name in ("r", "other"):
        kv.release(name)
    kv.check_integrity()


def test_a_claim_waits_for_room_up_to_the_watermark() -> None:
    transfer, _ = side(num_pages=11)  # ten can be claimed
    assert transfer.fits(PROMPT)
    assert not transfer.fits(Request("long", tuple(range(40))))
    first = transfer.claim("first", PROMPT, watermark=0.4)
    assert first is not None, "alone it may exceed the watermark"
    other = Request("o", tuple(range(100, 117)))
    kv = transfer._kv
    kv.adopt("first", "r", PROMPT.prompt_ids, 0, 0)
    assert transfer.claim("second", other, watermark=0.9) is None
    second = transfer.claim("second", other)
    assert second is not None
    assert kv.num_transfers == 1
    kv.check_integrity()
    transfer.release(second)
    kv.release("r")
    assert kv.available_pages == 10


def test_claims_of_waiting_prompts_are_bounded() -> None:
    transfer, _ = side(num_pages=41)
    most = int(MOST_CLAIMED * 40)
    claims = []
    for number in range(40):
        prompt = Request(f"{number}", tuple(range(100 * number, 100 * number + 11)))
        claims.append(transfer.claim(f"{number}", prompt))
    held = [claim for claim in claims if claim is not None]
    assert len(held) == most // 3
    assert transfer._kv.transfer_pages == 3 * len(held)
    large = Request("large", tuple(range(90)))
    assert transfer.claim("large", large) is None
    for claim in held:
        transfer.release(claim)
    alone = transfer.claim("large", large)
    assert alone is not None, "one prompt may be larger than the bound"
    transfer.release(alone)
    transfer._kv.check_integrity()


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
