"""`KVPool`: the tensors behind the page ids.

One layer is one tensor [2 × Hkv, slots, D], heads outermost: slot = page × page_size + offset.

    head 0 keys    | page 0 | page 1 | page 2 | … | tail |
    head 1 keys    | page 0 | page 1 | …
    head 0 values  | …

so that consecutive pages of one head are one contiguous [tokens, D] matrix, which attention can
read without gathering; and a page is [page_size, Hkv, D] with the same strides everywhere, which is
what kernels for paged attention read. Page 0 swallows padding.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

TAIL_SLOTS = 64  # a tile of keys may be read past the last page; it is masked out
ALIGNMENT = 64  # bytes, as torch's own memory: kernels may sum unaligned data in another order


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose memory, on the CPU, the system hands out when it is first written: torch.zeros
    writes all of it at once, which would make an idle pool as large as a full one.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    room = np.zeros(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return torch.from_numpy(room[start : start + size]).view(dtype).view(shape)


class KVPool:
    """Keys and values of `num_pages` pages in every layer. The memory is touched page by page."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        # The tail is whole pages: a layer splits into pages without being copied.
        self._stored_pages = num_pages + -(-TAIL_SLOTS // page_size)
        shape = (2 * num_kv_heads, self._stored_pages * page_size, head_dim)
        self.storage = [_zeros(shape, dtype, self.device) for _ in range(num_layers)]
        # torch moves and selects bytes, but few things else of one byte.
        self._cells = [s.view(torch.uint8) if dtype.itemsize == 1 else s for s in self.storage]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the tail not counted."""
        values = 2 * self.num_kv_heads * self.num_pages * self.page_size * self.head_dim
        return self.num_layers * values * self.dtype.itemsize

    def keys(self, layer: int) -> Tensor:
        """[P, page_size, Hkv, D], a view."""
        return self._paged(self.storage[layer][: self.num_kv_heads])

    def values(self, layer: int) -> Tensor:
        """[P, page_size, Hkv, D], a view."""
        return self._paged(self.storage[layer][self.num_kv_heads :])

    def _paged(self, heads: Tensor) -> Tensor:
        paged = heads.unflatten(1, (self._stored_pages, self.page_size))
        return paged[:, : self.num_pages].permute(1, 2, 0, 3)

    def as_stored(self, key_value: Tensor) -> Tensor:
        """Keys and values in the pool's format; what it cannot hold becomes its largest number."""
        if key_value.dtype == self.dtype:
            return key_value
        if self.dtype.itemsize == 1:
            largest = torch.finfo(self.dtype).max
            key_value = key_value.clamp(-largest, largest)
        return key_value.to(self.dtype)

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Store [T, 2, Hkv, D] keys and values in `slots` [T]."""
        source = self.as_stored(key_value).flatten(1, 2).transpose(0, 1)
        cells = self._cells[layer]
        if source.dtype != cells.dtype:
            source = source.view(cells.dtype)
        cells.index_copy_(1, slots, source)

    def take(self, layer: int, pages: Tensor) -> Tensor:
        """[2 × Hkv, n × page_size, D]: a copy of whole `pages` [n]."""
        paged = self._cells[layer].unflatten(1, (self._stored_pages, self.page_size))
        return paged.index_select(1, pages).flatten(1, 2).view(self.dtype)

    def gather(self, layer: int, pages: Tensor, out: Tensor) -> None:
        """Copy whole `pages` [n] into out [2 × Hkv, n × page_size, D]."""
        out.copy_(self.take(layer, pages))

    def __repr__(self) -> str:
        return (
            f"KVPool({self.num_layers} layers, {self.num_pages} pages of {self.page_size} tokens, "
            f"{self.num_kv_heads}×{self.head_dim} {self.dtype}, {self.nbytes / 2**20:.0f} MiB)"
        )
