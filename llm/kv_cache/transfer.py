"""`PageTransfer`: pages of prompts as bytes in host memory, to and from another engine.

    engine that computes prompts             engine that decodes
    prompt ─▶ prefix cache                   claim of pages for what is not cached
       claim ─▶ read ───────── bytes ──────────▶ write ─▶ release ─▶ prefix cache ─▶ prompt
       release, once all are read

Received pages become a part of the prefix cache, where the request finds them like any other
prefix. Only whole pages move, and never that of a prompt's last token, whose logits are needed: the
engine that decodes computes the rest of the prompt, at least one token.
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
from llm.request import Request

PART_BYTES = 4 * 2**20  # maximum size of what is moved at once, unless a page is larger


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

    `claim` and `release` belong to the engine's thread. `read` and `write` may run on any thread,
    as nothing else touches the contents of claimed pages.
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
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        self._queued = None if self._stream is None else torch.cuda.Event()

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

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Return the contents of claimed pages: uint8 [n × page_bytes], laid out as
        [L, 2 × Hkv, n, page_size, D]. Waits for the device.
        """
        with torch.inference_mode(), self._on_stream():
            values = self._pool.read_pages(self._index(pages)).view(torch.uint8)
            if values.device.type != "cpu":
                values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)
        return values.flatten().numpy()

    def write(self, pages: Sequence[int], data: memoryview | np.ndarray) -> None:
        """Write contents as returned by `read` to claimed pages. Waits for the device.

        Raises ValueError for another number of bytes.
        """
        source = np.frombuffer(data, np.uint8)
        if source.size != len(pages) * self.page_bytes:
            raise ValueError(f"{source.size} bytes for {len(pages)} pages of {self.page_bytes}")
        pool, is_on_gpu = self._pool, self._stream is not None
        host = torch.empty(source.size, dtype=torch.uint8, pin_memory=is_on_gpu)
        host.numpy()[:] = source
        heads = 2 * pool.num_kv_heads
        shape = (pool.num_layers, heads, len(pages), pool.page_size, pool.head_dim)
        with torch.inference_mode(), self._on_stream() as stream:
            values = host.view(pool.cell_dtype).view(shape).to(pool.device, non_blocking=True)
            pool.write_pages(self._index(pages), values)
            if stream is not None:
                stream.synchronize()

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, device=self._pool.device)

    @contextmanager
    def _on_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Run work on a stream of its own, on which it does not wait for a step."""
        stream, queued = self._stream, self._queued
        if stream is None or queued is None:
            yield None
            return
        with torch.cuda.device(self._pool.device), torch.cuda.stream(stream):
            stream.wait_event(queued)
            yield stream
