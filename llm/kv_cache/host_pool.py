"""`HostPool`: pages of a KV pool in host memory, slot by slot.

A slot is [L, 2 × Hkv, page_size, D], made when it is first used, pinned when the pool is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llm.kv_cache.kv_pool import KVPool

Launch = Callable[[Callable[[], None]], object]


class HostPool:
    """Implements `HostStore`. `launch` runs a copy in the order of the pool's other work."""

    def __init__(self, pool: KVPool, num_slots: int, launch: Launch) -> None:
        self._pool = pool
        self._launch = launch
        self._slots: list[Tensor] = []
        self.num_slots = num_slots

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(slot.nbytes for slot in self._slots)

    def save(self, page: int, slot: int) -> None:
        """Copy a page of the pool to a slot; slots are used from 0 on."""
        if slot == len(self._slots):
            self._slots.append(self._new_slot())
        target = self._slots[slot]

        def copy() -> None:
            for layer, values in enumerate(self._views(page)):
                target[layer].copy_(values, non_blocking=True)

        self._launch(copy)

    def load(self, slot: int, page: int) -> None:
        """Copy a slot to a page of the pool."""
        source = self._slots[slot]

        def copy() -> None:
            for layer, values in enumerate(self._views(page)):
                values.copy_(source[layer], non_blocking=True)

        self._launch(copy)

    def _views(self, page: int) -> list[Tensor]:
        """[2 × Hkv, page_size, D] of every layer."""
        size = self._pool.page_size
        return [storage[:, page * size : (page + 1) * size] for storage in self._pool.storage]

    def _new_slot(self) -> Tensor:
        pool = self._pool
        shape = (pool.num_layers, 2 * pool.num_kv_heads, pool.page_size, pool.head_dim)
        return torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")

    def __repr__(self) -> str:
        return f"HostPool({len(self._slots)} of {self.num_slots} slots made)"
