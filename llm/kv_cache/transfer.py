"""`PageTransfer`: pages of prompts, to and from another engine.

    engine that computes prompts             engine that decodes
    prompt ─▶ prefix cache                   claim of pages for what is not cached
       claim ─▶ read ──────── content ─────────▶ write ─▶ release ─▶ prefix cache ─▶ prompt
       release, once all are read

Received pages become a part of the prefix cache, where the request finds them like any other
prefix. Only whole pages move, and never that of a prompt's last token, whose logits are needed: the
engine that decodes computes the rest of the prompt, at least one token.

The content of pages is host memory, or that of a GPU in `PeerSlots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.manager import KVCacheManager
from llm.memory.peer_slots import Handle, PeerSlots
from llm.request import Request

PART_BYTES = 8 * 2**20  # maximum size of what is moved at once, unless a page is larger
PEER_PART_BYTES = 32 * 2**20  # the same for what a GPU writes to another GPU


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Properties that two engines share if one can use the other's pages."""

    model: str  # identity of the weights
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int  # in tokens

    def __str__(self) -> str:
        return (
            f"weights {self.model}, {self.num_layers} layers of "
            f"{self.num_kv_heads}x{self.head_dim} {self.dtype}, {self.page_size} tokens per page"
        )


@dataclass(frozen=True, slots=True)
class PageClaim:
    """Pages that are held for a transfer, from a prompt's first on; `num_cached` have their KV."""

    name: str
    request: Request
    pages: tuple[int, ...]
    num_cached: int


class PageTransfer:
    """Transfers of one pool's pages.

    `claim` and `release` belong to the engine's thread. The other methods may run on any thread, as
    nothing else touches the contents of claimed pages; they wait for the device.
    """

    def __init__(self, pool: KVPool, manager: KVCacheManager, model: str) -> None:
        """Create it for the pool behind a manager's pages. `model`: identity of the weights."""
        self._pool, self._kv = pool, manager
        dtype = str(pool.dtype).removeprefix("torch.")
        self.format = PageFormat(
            model, pool.num_layers, pool.num_kv_heads, pool.head_dim, dtype, pool.page_size
        )
        self.page_bytes = pool.nbytes // pool.num_pages
        """Size of a page of all layers."""
        self.part_pages = max(1, PART_BYTES // self.page_bytes)
        """Maximum number of pages that are moved at once."""
        self.part_bytes = self.part_pages * self.page_bytes
        self.peer_pages = max(1, PEER_PART_BYTES // self.page_bytes)
        """Maximum number of pages that a GPU writes to a slot of another GPU."""
        self.is_on_gpu = pool.device.type == "cuda"
        """Whether `PeerSlots` may be possible."""
        self._stream = torch.cuda.Stream(pool.device) if self.is_on_gpu else None
        self._queued = torch.cuda.Event() if self.is_on_gpu else None

    def num_pages(self, request: Request) -> int:
        """Return how many pages of a prompt can be moved."""
        return (len(request.prompt_ids) - 1) // self._kv.page_size

    def fits(self, request: Request) -> bool:
        """Whether a claim can succeed once nothing else holds pages."""
        return self._kv.pages_for(len(request.prompt_ids)) <= self._kv.total_pages

    def claim(self, name: str, request: Request, watermark: float = 1.0) -> PageClaim | None:
        """Claim a prompt's pages under a name that is not in use.

        Returns None, and claims nothing, when too few are available, or the used share of the pool
        would exceed `watermark` while something else holds pages.
        """
        count, kv = self.num_pages(request), self._kv
        token_ids = request.prompt_ids[: count * kv.page_size + 1]
        num_hits = kv.claim(
            name,
            token_ids,
            cache_salt=request.cache_namespace,
            watermark=watermark if kv.num_claims else 1.0,
            is_transfer=True,
        )
        if num_hits is None:
            return None
        if self._queued is not None:  # the last contents of a page may be in flight to the host
            self._queued.record(torch.cuda.current_stream(self._pool.device))
        pages = tuple(kv.pages(name)[:count])
        return PageClaim(name, request, pages, num_hits // kv.page_size)

    def release(self, claim: PageClaim, *, num_written: int = 0, num_read: int = 0) -> None:
        """Release a claim. The pages written, from the first that was not cached on, become a part
        of the prefix cache.
        """
        num_tokens = (claim.num_cached + num_written) * self._kv.page_size
        self._kv.release(claim.name, claim.request.prompt_ids, num_tokens)
        self._kv.num_received += num_written
        self._kv.num_sent += num_read

    def buffer(self, num_pages: int) -> np.ndarray:
        """Return host memory for the content of pages: uint8 [num_pages × page_bytes]."""
        size = num_pages * self.page_bytes
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_on_gpu).numpy()

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Return the content of claimed pages, laid out as [L, 2 × Hkv, n, page_size, D]."""
        content = self.buffer(len(pages))
        with self._on_stream():
            torch.from_numpy(content).copy_(self._read(pages))
        return content

    def write(self, pages: Sequence[int], content: np.ndarray) -> None:
        """Write content as returned by `read`, in a `buffer`, to claimed pages."""
        with self._on_stream():
            self._write(pages, torch.from_numpy(content).to(self._pool.device, non_blocking=True))

    def create_slots(self, num_slots: int) -> PeerSlots:
        """Allocate slots for parts. Raises `RuntimeError`."""
        return PeerSlots.create(self._pool.device, num_slots, self.peer_pages * self.page_bytes)

    def open_slots(self, handle: Handle, num_slots: int) -> PeerSlots:
        """Map the slots of another process. Raises the errors of `PeerSlots.open`."""
        size = self.peer_pages * self.page_bytes
        return PeerSlots.open(handle, self._pool.device, num_slots, size)

    def read_to(self, pages: Sequence[int], slots: PeerSlots, slot: int) -> None:
        """Copy the content of claimed pages to another process's slot. Raises `RuntimeError`."""
        with self._on_stream():
            content = self._read(pages)
            slots[slot][: len(content)].copy_(content)

    def write_from(self, pages: Sequence[int], slots: PeerSlots, slot: int) -> None:
        """Write a slot's content to claimed pages."""
        with self._on_stream():
            self._write(pages, slots[slot][: len(pages) * self.page_bytes])

    def _read(self, pages: Sequence[int]) -> Tensor:
        return self._pool.read_pages(self._index(pages)).view(torch.uint8).flatten()

    def _write(self, pages: Sequence[int], content: Tensor) -> None:
        pool = self._pool
        shape = (pool.num_layers, 2 * pool.num_kv_heads, len(pages), pool.page_size, pool.head_dim)
        pool.write_pages(self._index(pages), content.view(pool.cell_dtype).view(shape))

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, device=self._pool.device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run work on a stream of its own, on which it does not wait for a step; wait for its end
        at the end of the block.
        """
        stream, queued = self._stream, self._queued
        if stream is None or queued is None:
            with torch.inference_mode():
                yield
            return
        with (
            torch.inference_mode(),
            torch.cuda.device(self._pool.device),
            torch.cuda.stream(stream),
        ):
            stream.wait_event(queued)
            yield
            stream.synchronize()
