"""`HostPool`: pages of KV pools in host memory, slot by slot.

A slot is [L, 2 × Hkv, page_size, D] of each pool (the model's, and a draft model's). It is
allocated at its first use, and pinned when the pool is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llm.kv_cache.kv_pool import KVPool

Launch = Callable[[Callable[[], None]], object]


class HostPool:
    """Implements `HostStore`. `launch` runs a copy in the order of the pool's other work."""

    def __init__(self, pools: Sequence[KVPool], num_slots: int, launch: Launch) -> None:
        self._pools = pools
        self._launch = launch
        self._slots: list[list[Tensor]] = []
        self.num_slots = num_slots

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return sum(part.nbytes for slot in self._slots for part in slot)

    def save(self, page: int, slot: int) -> None:
        """Copy a page of the pool to a slot; slots are used from 0 on."""
        if slot == len(self._slots):
            self._slots.append([_new_part(pool) for pool in self._pools])
        parts = self._slots[slot]

        def copy() -> None:
            for pool, part in zip(self._pools, parts, strict=True):
                for layer, values in enumerate(_views(pool, page)):
                    part[layer].copy_(values, non_blocking=True)

        self._launch(copy)

    def load(self, slot: int, page: int) -> None:
        """Copy a slot to a page of the pool."""
        parts = self._slots[slot]

        def copy() -> None:
            for pool, part in zip(self._pools, parts, strict=True):
                for layer, values in enumerate(_views(pool, page)):
                    values.copy_(part[layer], non_blocking=True)

        self._launch(copy)

    def __repr__(self) -> str:
        return f"HostPool({len(self._slots)} of {self.num_slots} slots made)"


def _views(pool: KVPool, page: int) -> list[Tensor]:
    """Return views [2 × Hkv, page_size, D] of every layer."""
    size = pool.page_size
    return [storage[:, page * size : (page + 1) * size] for storage in pool.storage]


def _new_part(pool: KVPool) -> Tensor:
    shape = (pool.num_layers, 2 * pool.num_kv_heads, pool.page_size, pool.head_dim)
    return torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
