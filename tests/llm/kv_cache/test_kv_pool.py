"""Memory of a pool on a CPU: the system gives it page by page, as it is written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from llm.errors import CapacityError
from llm.kv_cache.kv_pool import KVPool

MIB = 2**20
HEADS, DIM = 4, 64


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_prompt_takes_memory_of_its_own_pages_only() -> None:
    pool = KVPool(8, 1024, 16, HEADS, DIM, torch.float32)
    assert pool.nbytes > 200 * MIB
    slots = torch.arange(16, 56)
    prompt = torch.randn(len(slots), 2, HEADS, DIM)
    pool.write(0, slots, prompt)
    before = resident_bytes()
    for layer in range(1, pool.num_layers):
        pool.write(layer, slots, prompt)
    assert resident_bytes() - before < 8 * MIB
    keys, values = (part.flatten(0, 1)[slots] for part in (pool.keys(7), pool.values(7)))
    assert torch.equal(torch.stack((keys, values), 1), prompt)
    assert not pool.storage[7][:, 56:].any()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_pool_without_room_is_an_error_with_its_size(is_shared: bool) -> None:
    num_pages = 2**34  # more than a process can address
    with pytest.raises(CapacityError, match=rf"^\d+ MiB of memory for {num_pages} KV pages: "):
        KVPool(2, num_pages, 16, HEADS, DIM, torch.float32, is_shared=is_shared)
