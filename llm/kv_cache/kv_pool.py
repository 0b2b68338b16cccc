"""`KVPool`: the tensors behind the page ids.

One layer is one tensor [2 × Hkv, slots, D], heads outermost: slot = page × page_size + offset.

    head 0 keys    | page 0 | page 1 | page 2 | … | tail |
    head 1 keys    | page 0 | page 1 | …
    head 0 values  | …

so that consecutive pages of one head are one contiguous [tokens, D] matrix, which attention can
read without gathering, and a page is [page_size, Hkv, D] with the same strides everywhere, which is
what kernels for paged attention read. Page 0 swallows padding.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from llm.errors import CapacityError
from llm.memory.shared_file import SharedFile

TAIL_SLOTS = 64  # a tile of keys may be read past the last page; it is masked out
FLOAT8_CAPABILITY = (8, 9)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros whose CPU memory the system allocates at the first write.

    torch.zeros writes all of it at once, so that an unused pool would take its full size.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)
    # In pages of 2 MiB a first prompt would wait 0.1 s until those of all heads are 0.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # on Linux
        with suppress(OSError):  # a kernel without such pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _has_float8(device: torch.device) -> bool:
    """Return whether kernels on the device can convert to float8 and from it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


class KVPool:
    """Keys and values of `num_pages` pages in every layer. Memory is committed page by page."""

    def __init__(  # noqa: PLR0913 - the sizes of all dimensions
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        is_shared: bool = False,
    ) -> None:
        """Allocate the pages. `is_shared`: other processes can map them, see `PoolHandle`, also
        those of a CPU where the system has files in memory.

        Raises CapacityError when the system has no room for those of a CPU.
        """
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.file: SharedFile | None = None
        """File of the pages of a CPU, if they are shared."""
        try:
            self.storage = self._allocate(is_shared)
        except OSError as error:
            size = num_layers * self.layer_bytes(num_pages) / 2**20
            raise CapacityError(
                f"{size:.0f} MiB of memory for {num_pages} KV pages: {error.strerror}; lower "
                "kv_cache.num_pages"
            ) from error
        # torch can move and select float8 values, but supports few other operations on them.
        self._cells = [s.view(torch.uint8) if dtype.itemsize == 1 else s for s in self.storage]
        self.kernels_take_float8 = dtype is torch.float8_e4m3fn and _has_float8(self.device)
        self._views = [self._paged(layer).split(num_kv_heads, dim=2) for layer in self.storage]

    def _allocate(self, is_shared: bool) -> list[Tensor]:
        """Return the memory of each layer."""
        shape = self.layer_shape(self.num_pages)
        on_cpu = self.device.type == "cpu"
        if is_shared and self.num_layers and on_cpu and SharedFile.is_available():
            size = self.layer_bytes(self.num_pages)
            self.file = SharedFile(self.num_layers * size)
            return [m.view(self.dtype).view(shape) for m in self.file.memory.split(size)]
        return [_zeros(shape, self.dtype, self.device) for _ in range(self.num_layers)]

    def layer_shape(self, num_pages: int) -> tuple[int, int, int]:
        """Return the shape [2 × Hkv, slots, D] of a layer of a pool with so many pages.

        The tail has whole pages, so that a layer splits into pages without a copy.
        """
        stored_pages = num_pages + -(-TAIL_SLOTS // self.page_size)
        return 2 * self.num_kv_heads, stored_pages * self.page_size, self.head_dim

    def layer_bytes(self, num_pages: int) -> int:
        """Return the size of such a layer."""
        return math.prod(self.layer_shape(num_pages)) * self.dtype.itemsize

    def by_words(self, layer: Tensor) -> Tensor:
        """Return a view [2 × Hkv, pages, words] of a layer, for copies of whole pages: int64 words
        where a page has whole ones.
        """
        by_page = layer.unflatten(1, (-1, self.page_size)).flatten(2)
        size = by_page.shape[2] * self.dtype.itemsize
        return by_page.view(torch.uint8 if size % torch.int64.itemsize else torch.int64)

    @property
    def cell_dtype(self) -> torch.dtype:
        """Type of the pages' contents outside of the pool: uint8 for float8."""
        return self._cells[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all layers without the tail."""
        values = 2 * self.num_kv_heads * self.num_pages * self.page_size * self.head_dim
        return self.num_layers * values * self.dtype.itemsize

    def keys(self, layer: int) -> Tensor:
        """Return a view [P, page_size, Hkv, D]."""
        return self._views[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return a view [P, page_size, Hkv, D]."""
        return self._views[layer][1]

    def read_pages(self, pages: Tensor) -> Tensor:
        """Return a copy [L, 2 × Hkv, n, page_size, D] of whole `pages` [n], as `cell_dtype`."""
        return torch.stack([self._by_page(cells).index_select(1, pages) for cells in self._cells])

    def write_pages(self, pages: Tensor, values: Tensor) -> None:
        """Replace whole `pages` [n] by values as `read_pages` returns them."""
        for cells, layer in zip(self._cells, values, strict=True):
            self._by_page(cells).index_copy_(1, pages, layer)

    def _by_page(self, cells: Tensor) -> Tensor:
        return cells.unflatten(1, (-1, self.page_size))

    def _paged(self, heads: Tensor) -> Tensor:
        paged = heads.unflatten(1, (-1, self.page_size))
        return paged[:, : self.num_pages].permute(1, 2, 0, 3)

    def as_stored(self, key_value: Tensor) -> Tensor:
        """Convert keys and values to the pool's format; values out of range are clamped."""
        if self.dtype.itemsize == 1:
            largest = torch.finfo(self.dtype).max
            key_value = key_value.clamp(-largest, largest)
        return key_value.to(self.dtype)

    def write(self, layer: int, slots: Tensor, key_value: Tensor) -> None:
        """Store [T, 2, Hkv, D] keys and values in `slots` [T]."""
        if key_value.dtype != self.dtype:
            key_value = self.as_stored(key_value)
        source = key_value.flatten(1, 2).transpose(0, 1)
        cells = self._cells[layer]
        if source.dtype != cells.dtype:
            source = source.view(cells.dtype)
        cells.index_copy_(1, slots, source)

    def take(self, layer: int, pages: Tensor) -> Tensor:
        """Return a copy [2 × Hkv, n × page_size, D] of whole `pages` [n]."""
        paged = self._by_page(self._cells[layer])
        return paged.index_select(1, pages).flatten(1, 2).view(self.dtype)

    def gather(self, layer: int, pages: Tensor, out: Tensor) -> None:
        """Copy whole `pages` [n] into out [2 × Hkv, n × page_size, D]."""
        out.copy_(self.take(layer, pages))

    def __repr__(self) -> str:
        return (
            f"KVPool({self.num_layers} layers, {self.num_pages} pages of {self.page_size} tokens, "
            f"{self.num_kv_heads}×{self.head_dim} {self.dtype}, {self.nbytes / 2**20:.0f} MiB)"
        )
