"""Prefix pages in host memory: they are restored with their contents, and evicted in order."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from llm.config import PipelineConfig
from llm.engine.engine import Engine, assemble_engine, create_engine
from llm.errors import ConfigError
from llm.kv_cache.host_pool import HostPool
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.manager import KVCacheManager
from llm.pipeline import base
from llm.pipeline.overlap import OverlapTextGenerationPipeline
from llm.request import Request, SamplingParams, TokenChunk
from llm.scheduler import SchedulerLimits
from tests.llm.kv_cache.test_kv_manager import SIZE, ManagerMachine, prompt, use
from tests.llm.runner.late_stream import LateStream
from tests.llm.scheduler.shadow import Harness, ShadowPipeline, expected_output


class Shelf:
    """A store that records which page went to which slot."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.log: list[tuple[str, int, int]] = []

    def save(self, page: int, slot: int, /) -> None:
        self.log.append(("save", page, slot))

    def load(self, slot: int, page: int, /) -> None:
        self.log.append(("load", slot, page))


def manager(num_pages: int, num_slots: int) -> tuple[KVCacheManager, Shelf]:
    shelf = Shelf(num_slots)
    return KVCacheManager(num_pages + 1, SIZE, host=shelf), shelf


def used_up(kv: KVCacheManager, request_id: str, tokens: list[int], salt: str = "") -> int:
    """Claim, compute and release; return the number of cached tokens."""
    hits = use(kv, request_id, tokens, salt)
    kv.release(request_id, tokens, len(tokens))
    kv.check_integrity()
    return hits


def test_an_evicted_prefix_is_restored() -> None:
    kv, shelf = manager(4, 10)
    used_up(kv, "a", prompt(12))  # three pages
    used_up(kv, "b", prompt(16, first=50))
    assert (kv.host_pages, kv.num_pages_to_host, kv.cached_pages) == (3, 3, 4)
    assert kv.claim("c", prompt(13)) == 12
    assert (kv.host_pages, kv.num_pages_from_host) == (4, 3)  # evicted for b's pages
    loaded = [page for verb, _, page in shelf.log if verb == "load"]
    assert loaded == list(kv.pages("c"))[:3]
    kv.check_integrity()


def test_without_room_on_the_host_the_oldest_leaf_is_forgotten() -> None:
    kv, _ = manager(4, 2)
    used_up(kv, "a", prompt(12))
    used_up(kv, "b", prompt(16, first=50))
    assert kv.host_pages == 2
    # Of a's three pages the last was evicted first, and was dropped for the first ones.
    assert kv.claim("c", prompt(13)) == 8
    kv.check_integrity()


def test_a_claim_that_needs_every_slot_still_gets_its_pages() -> None:
    kv, _ = manager(4, 3)
    used_up(kv, "a", prompt(12))
    used_up(kv, "b", prompt(16, first=50))
    assert kv.host_pages == 3, "all of them a's"
    assert kv.claim("c", prompt(16)) == 12
    assert (kv.host_pages, kv.cached_pages) == (0, 0), "b's pages had nowhere to go"
    kv.release("c")
    kv.check_integrity()


def test_a_page_computed_again_takes_the_place_of_its_copy() -> None:
    kv, _ = manager(5, 10)
    kv.claim("b", prompt(8))  # nothing is cached yet
    used_up(kv, "a", prompt(8))
    kv.claim("c", prompt(12, first=50))  # moves both cached pages to the host
    assert (kv.host_pages, kv.cached_pages) == (2, 0)
    kv.commit("b", prompt(8), 8)
    assert (kv.host_pages, kv.used_pages) == (0, 5)
    kv.check_integrity()
    kv.release("c")
    assert kv.claim("d", prompt(9)) == 8
    assert list(kv.pages("d"))[:2] == list(kv.pages("b"))


def test_restored_pages_count_against_the_watermark() -> None:
    kv, _ = manager(10, 10)
    used_up(kv, "a", prompt(33))
    used_up(kv, "b", prompt(40, first=500))
    assert kv.host_pages == 8
    assert kv.claim("c", prompt(33), watermark=0.8) is None
    assert kv.host_pages == 8, "nothing has changed"
    assert kv.claim("c", prompt(33), watermark=0.9) == 32
    kv.check_integrity()


def test_salts_are_separate_on_the_host() -> None:
    kv, _ = manager(4, 10)
    used_up(kv, "a", prompt(12), "adapter 1")
    used_up(kv, "b", prompt(16, first=50))
    assert use(kv, "c", prompt(13), "adapter 2") == 0
    kv.release("c")
    assert use(kv, "d", prompt(13), "adapter 1") == 12
    kv.check_integrity()


def test_the_host_is_told() -> None:
    kv, _ = manager(4, 10)
    used_up(kv, "a", prompt(12))
    used_up(kv, "b", prompt(16, first=50))
    assert repr(kv) == (
        "KVCacheManager(0 requests hold 0 of 4 pages, 4 cached, 3 of 10 host slots)"
    )


class SwappingMachine(ManagerMachine):
    """The same requests with a small host store behind the pool, which moves the slots' tokens."""

    num_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.shelf: dict[int, list[int]] = {}
        self.kv = KVCacheManager(13, SIZE, host=self)

    def save(self, page: int, slot: int, /) -> None:
        self.shelf[slot] = [self.slots.pop(page * SIZE + offset) for offset in range(SIZE)]

    def load(self, slot: int, page: int, /) -> None:
        for offset, token in enumerate(self.shelf.pop(slot)):
            self.slots[page * SIZE + offset] = token


TestSwappingMachine = SwappingMachine.TestCase
TestSwappingMachine.settings = settings(max_examples=40, stateful_step_count=40)


def test_a_preempted_request_finds_its_pages_on_the_host() -> None:
    """Its prompt and output are not computed again, except for the last page."""
    pipeline = ShadowPipeline(8, 4, num_slots=20)
    made = Harness(SchedulerLimits(kvcache_ce_watermark=1.0), pipeline)
    for name in "abc":
        made.add(name, 8, stop_token_ids=(), max_tokens=12)
    made.run_all()
    assert made.scheduler.num_preemptions
    assert made.kv.num_pages_from_host
    for name in "abc":
        assert made.result(name) == expected_output(made.requests[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_is_restored_bit_for_bit_without_touching_others(dtype: torch.dtype) -> None:
    pool = KVPool(3, 5, 4, 2, 8, dtype)
    for storage in pool.storage:
        storage.copy_(torch.randn(storage.shape))
    before = [storage.clone() for storage in pool.storage]
    host = HostPool([pool], 2, lambda copy: copy())
    host.save(2, 0)
    host.save(3, 1)
    for storage in pool.storage:
        storage.zero_()
    host.load(0, 4)
    for storage, old in zip(pool.storage, before, strict=True):
        pages, old_pages = storage.unflatten(1, (-1, 4)), old.unflatten(1, (-1, 4))
        assert torch.equal(pages[:, 4], old_pages[:, 2])
        assert not pages[:, :4].any()
    assert host.nbytes == 2 * 3 * 4 * 4 * 8 * dtype.itemsize
    host.save(4, 0)
    assert repr(host) == "HostPool(2 of 2 slots made)"


# --- the whole engine


def config(checkpoint: Path, **cache: Any) -> PipelineConfig:
    own = {"kv_cache_page_size": 16, "num_pages": 12, "enable_kvcache_swapping_to_host": True}
    model = {"model_path": str(checkpoint), "kv_cache": own | cache}
    return PipelineConfig(model=model, max_batch_size=2, kvcache_ce_watermark=1.0)


def ask(engine: Engine, name: str, first: int) -> tuple[tuple[int, ...], TokenChunk]:
    ids = tuple((first + 7 * index) % 250 for index in range(70))
    sampling = SamplingParams(seed=3, temperature=0.9, max_tokens=20, ignore_eos=True)
    chunks = list(engine.submit(Request(name, ids, sampling)))
    return tuple(token for chunk in chunks for token in chunk.token_ids), chunks[-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_tokens_from_pages_that_were_on_the_host(
    tiny_checkpoint: Path, overlap: bool
) -> None:
    made = config(tiny_checkpoint, host_kvcache_swap_space_gb=0.01)
    if overlap:
        pipeline = OverlapTextGenerationPipeline(made, stream=LateStream())
        engine = assemble_engine(pipeline, made)
    else:
        engine = create_engine(made)
    engine.start()
    try:
        first, chunk = ask(engine, "first", 1)
        assert chunk.cached_prompt_tokens == 0
        for index in range(3):  # eleven pages hold two of these requests
            ask(engine, f"other {index}", 100 + index)
        stats = engine.stats()
        assert stats.pages_to_host >= 5
        again, chunk = ask(engine, "again", 1)
        assert again == first
        assert chunk.cached_prompt_tokens == 64
        assert engine.stats().pages_from_host - stats.pages_from_host >= 4
        assert (engine.stats().used_pages, engine.stats().host_pages > 0) == (0, True)
    finally:
        engine.shutdown()


def test_without_swapping_an_evicted_prefix_is_computed_again(tiny_checkpoint: Path) -> None:
    engine = create_engine(config(tiny_checkpoint, enable_kvcache_swapping_to_host=False))
    engine.start()
    first, _ = ask(engine, "first", 1)
    for index in range(3):
        ask(engine, f"other {index}", 100 + index)
    again, chunk = ask(engine, "again", 1)
    engine.shutdown()
    assert (again, chunk.cached_prompt_tokens) == (first, 0)
    assert engine.stats().pages_to_host == 0


def test_swap_space_that_holds_no_page_is_an_error(tiny_checkpoint: Path) -> None:
    made = config(tiny_checkpoint, host_kvcache_swap_space_gb=1e-6)
    with pytest.raises(ConfigError, match="host_kvcache_swap_space_gb=1e-06 holds no page of"):
        create_engine(made)


def test_swap_space_is_cut_to_what_the_host_has(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "available_bytes", lambda device: 2**30)
    with caplog.at_level(logging.WARNING):
        engine = create_engine(config(tiny_checkpoint))
    assert "host_kvcache_swap_space_gb is cut from 50.0 to 0.8 GiB" in caplog.text
    assert "0 of" in repr(engine.pipeline.kv_manager)


def test_swapping_needs_the_prefix_cache(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="swapping_to_host=True needs enable_prefix_caching"):
        config(tiny_checkpoint, enable_prefix_caching=False)
