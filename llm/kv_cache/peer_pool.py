"""`PeerPool`: the KV pages of another process of this machine, which this process writes.

    pool's process: share_pool(its pool) ───▶ writer: PeerPool.open(handle), once
                    ids of claimed pages ───▶ writer: write(pages, own pool, own pages)

A GPU's memory is shared by CUDA's handles of memory (IPC): the writer maps it on its own device, so
that a copy takes the shortest way between the two. That of a CPU is a file in memory.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from llm.kv_cache.pool_handle import CudaHandle, PoolHandle
from llm.memory.shared_file import SharedFile
from llm.memory.transfer import to_device

COPY_BYTES = 32 * 2**20  # of one layer: size of the temporary copy of pages that are written
_PATH = re.compile("/proc/[0-9]{1,20}/fd/[0-9]{1,10}")


def share_pool(pool: KVPool) -> PoolHandle | None:
    """Return the handle of a pool for one other process; None where it cannot be shared.

    Raises `RuntimeError` for CUDA's errors.
    """
    if pool.device.type == "cuda":
        return PoolHandle(pool.num_pages, layers=tuple(map(_cuda_handle, pool.storage)))
    file = pool.file
    return None if file is None else PoolHandle(pool.num_pages, file.path, file.number)


class PeerPool:
    """Pages of another process's pool, with the format of a pool of this one."""

    def __init__(self, own: KVPool, layers: Sequence[Tensor], num_pages: int) -> None:
        """Use layers [2 × Hkv, slots, D] of the own pool's format; see `open`."""
        self._own = [own.by_words(layer) for layer in own.storage]
        self._layers = [own.by_words(layer) for layer in layers]
        self._device, self._num_pages = own.device, num_pages
        page_bytes = own.nbytes // own.num_pages // own.num_layers
        self._most = max(1, COPY_BYTES // page_bytes)

    @classmethod
    def open(cls, handle: PoolHandle, own: KVPool) -> PeerPool:
        """Map the pool of another process. Raises `RuntimeError` where this device cannot reach it,
        `OSError` without its file, and `ValueError` for another size or another kind of device.
        """
        shape = own.layer_shape(handle.num_pages)
        num_bytes = own.layer_bytes(handle.num_pages)
        if own.device.type == "cuda":
            if len(handle.layers) != own.num_layers:
                raise ValueError(f"{len(handle.layers)} layers of {own.num_layers}")
            memory = [_open_cuda(layer, own.device, num_bytes) for layer in handle.layers]
        else:
            memory = _open_file(handle, own.num_layers, num_bytes)
        return cls(own, [m.view(own.dtype).view(shape) for m in memory], handle.num_pages)

    def write(
        self,
        pages: Sequence[int],
        own_pages: Sequence[int],
        stored: LayerMarks | None = None,
    ) -> None:
        """Copy own pages to pages of the other pool, on the current stream of a GPU: each layer
        behind its mark in `stored`, if there are marks.

        Raises `ValueError` for pages that the other pool does not have, or another number of them.
        """
        if len(pages) != len(own_pages) or not all(0 < p < self._num_pages for p in pages):
            raise ValueError(f"{len(own_pages)} pages for {len(pages)} of {self._num_pages}")
        ids = [
            to_device(torch.tensor(each), self._device).split(self._most)
            for each in (pages, own_pages)
        ]
        for number, (own, layer) in enumerate(zip(self._own, self._layers, strict=True)):
            if stored is not None:
                stored.wait(number)
            for targets, sources in zip(*ids, strict=True):
                layer.index_copy_(1, targets, own.index_select(1, sources))


def _cuda_handle(layer: Tensor) -> CudaHandle:
    storage: Any = layer.untyped_storage()
    _, handle, size, offset, counter, place, _, _ = storage._share_cuda_()
    return handle, size, offset, counter, place


def _open_cuda(handle: CudaHandle, device: torch.device, num_bytes: int) -> Tensor:
    memory_handle, size, offset, counter, place = handle
    if size != num_bytes:
        raise ValueError(f"{size} bytes of a layer with {num_bytes}")
    storage: Any = torch.UntypedStorage
    # Without the event of the memory's last writer: what it contains is not read here.
    shared = storage._new_shared_cuda(
        device.index or 0, memory_handle, size, offset, counter, place, b"", False
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(shared)


def _open_file(handle: PoolHandle, num_layers: int, num_bytes: int) -> list[Tensor]:
    path = handle.file
    if not _PATH.fullmatch(path):
        raise ValueError("no file of a pool")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or found.st_ino != handle.number:
            raise ValueError(f"{path} is no file of a pool")
        size = num_layers * num_bytes
        if found.st_size != size:
            raise ValueError(f"{found.st_size} bytes of a pool with {size}")
        return list(SharedFile.map(file, size).split(num_bytes))
    finally:
        os.close(file)
