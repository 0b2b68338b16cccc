"""`PageTransfer`: pages of prompts, to and from another engine.

    engine that computes prompts             engine that decodes
    prompt ─▶ its claim is kept              claim of pages for what is not cached
       read ──────────────── content ─────────▶ write
       write_to ──────────── the pages of the other pool themselves (`PeerPool`)
       release, once all are read            the claim becomes the request's

The pages of a whole prompt move, also the last one, which is not full: the engine that decodes
feeds the last token of the prompt, or the first one that the other engine has sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.peer_pool import PeerPool, share_pool
from llm.kv_cache.pool_handle import PoolHandle
from llm.request import Request, Token
from llm.sequence import ReceivedPrompt

PART_BYTES = 8 * 2**20  # maximum size of what is moved at once, unless a page is larger
MOST_CLAIMED = 0.25  # of the pool, by prompts that other engines compute


def _no_marks() -> None:
    return None


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


class LaunchedPages(NamedTuple):
    """Pages of a prompt that a step completes. They are the request's until it ends."""

    pages: tuple[int, ...]
    stored: LayerMarks | None  # None: they have their KV already


class PageTransfer:
    """Transfers of one pool's pages.

    `claim`, `launched`, `kept`, `release` and `share` belong to the engine's thread. The other
    methods may run on any thread, as nothing else touches the contents of claimed pages; they wait
    for the device.
    """

    def __init__(
        self,
        pool: KVPool,
        manager: KVCacheManager,
        model: str,
        marks: Callable[[], LayerMarks | None] = _no_marks,
    ) -> None:
        """Create it for the pool behind a manager's pages.

        `model`: identity of the weights. `marks`: returns those of the newest forward.
        """
        self._pool, self._kv, self._marks = pool, manager, marks
        dtype = str(pool.dtype).removeprefix("torch.")
        self.format = PageFormat(
            model, pool.num_layers, pool.num_kv_heads, pool.head_dim, dtype, pool.page_size
        )
        self.page_bytes = pool.nbytes // pool.num_pages
        """Size of a page of all layers."""
        self.part_pages = max(1, PART_BYTES // self.page_bytes)
        """Maximum number of pages that are moved at once."""
        self.part_bytes = self.part_pages * self.page_bytes
        self.is_on_gpu = pool.device.type == "cuda"
        """Whether the pages are in a GPU's memory."""
        self._stream = torch.cuda.Stream(pool.device) if self.is_on_gpu else None
        # of copies that wait for a forward, so that no other one waits behind them
        self._late_stream = torch.cuda.Stream(pool.device) if self.is_on_gpu else None
        self._queued = torch.cuda.Event() if self.is_on_gpu else None

    def num_pages(self, request: Request) -> int:
        """Return how many pages a prompt has."""
        return self._kv.pages_for(len(request.prompt_ids))

    def is_worthwhile(self, request: Request, num_cached: int = 0) -> bool:
        """Whether more than a page of a prompt is to be computed, with so many cached pages."""
        return (len(request.prompt_ids) - 1) // self._kv.page_size > num_cached

    def num_cached(self, request: Request) -> int:
        """Return how many pages of a prompt are cached here, as a hint: a claim has the number."""
        return self._kv.num_cached(request.prompt_ids, request.cache_namespace)

    def fits(self, request: Request) -> bool:
        """Whether a claim can succeed once nothing else holds pages."""
        return self._kv.pages_for(len(request.prompt_ids) + 1) <= self._kv.total_pages

    def claim(self, name: str, request: Request, watermark: float = 1.0) -> PageClaim | None:
        """Claim pages for a prompt and a token under a name that is not in use.

        Returns None, and claims nothing, when too few are available, when the used share of the
        pool would exceed `watermark` while something else holds pages, or when the claims of all
        transfers would exceed `MOST_CLAIMED`, unless it is the only one.
        """
        kv, prompt = self._kv, request.prompt_ids
        num_pages = kv.pages_for(len(prompt) + 1)
        if kv.num_transfers and kv.transfer_pages + num_pages > MOST_CLAIMED * kv.total_pages:
            return None
        num_hits = kv.claim(
            name,
            prompt,
            cache_salt=request.cache_namespace,
            watermark=watermark if kv.num_claims else 1.0,
            is_transfer=True,
        )
        if num_hits is None:
            return None
        if not kv.extend(name, len(prompt) + 1):
            kv.release(name)
            return None
        if self._queued is not None and kv.host_pages:
            self._queued.record(torch.cuda.current_stream(self._pool.device))
        pages = tuple(kv.pages(name)[: self.num_pages(request)])
        return PageClaim(name, request, pages, num_hits // kv.page_size)

    @property
    def is_room_free(self) -> bool:
        """Whether the pages claimed so far can be written: their last contents may be on the way to
        the host's memory, for which another GPU does not wait.
        """
        return self._queued is None or self._queued.query()

    def wait_for_room(self) -> None:
        """Wait until `is_room_free`."""
        if self._queued is not None:
            self._queued.synchronize()

    @property
    def writes_early(self) -> bool:
        """Whether pages can be written to another process's pool while a step computes them."""
        return self.is_on_gpu

    def launched(self, pages: Sequence[int], request: Request) -> LaunchedPages:
        """Return a prompt's pages whose last step was just launched, see `Engine.submit`."""
        stored = None
        if self.is_on_gpu:
            stored = self._marks() or LayerMarks()
            stored.note_end()
        return LaunchedPages(tuple(pages[: self.num_pages(request)]), stored)

    def kept(self, name: str, request: Request) -> PageClaim:
        """Return the claim that a request has left under a name, see `Engine.submit`."""
        pages = tuple(self._kv.pages(name)[: self.num_pages(request)])
        return PageClaim(name, request, pages, len(pages))

    def received(self, claim: PageClaim, num_written: int, token: Token | None) -> ReceivedPrompt:
        """Return a claim as what `Engine.submit` takes over, of whose pages so many were written.

        `token`: sampled by the engine that has written the last one.
        """
        num_known = claim.num_cached + num_written
        num_prompt = len(claim.request.prompt_ids)
        is_whole = num_known == len(claim.pages)
        if not is_whole or token is None:  # the logits of the last token are needed
            num_tokens = min(num_known * self._kv.page_size, num_prompt - 1)
            return ReceivedPrompt(claim.name, num_written, num_tokens)
        return ReceivedPrompt(claim.name, num_written, num_prompt, token)

    def release(self, claim: PageClaim, *, num_written: int = 0, num_read: int = 0) -> None:
        """Release a claim. The full pages written, from the first that was not cached on, become a
        part of the prefix cache.
        """
        prompt = claim.request.prompt_ids
        num_tokens = (claim.num_cached + num_written) * self._kv.page_size
        self._kv.release(claim.name, prompt, min(num_tokens, len(prompt)))
        self._kv.num_received += num_written
        self._kv.num_sent += num_read

    def buffer(self, num_pages: int) -> np.ndarray:
        """Return host memory for the content of pages: uint8 [num_pages × page_bytes]."""
        size = num_pages * self.page_bytes
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_on_gpu).numpy()

    def read(self, pages: Sequence[int]) -> np.ndarray:
        """Return the content of claimed pages, laid out as [L, 2 × Hkv, n, page_size, D]."""
        content = self.buffer(len(pages))
        with self._on_stream(self._stream):
            found = self._pool.read_pages(self._index(pages))
            torch.from_numpy(content).copy_(found.view(torch.uint8).flatten())
        return content

    def digest(self, pages: Sequence[int]) -> int:
        """Return a checksum of the content of the first claimed pages, at most a part."""
        return zlib.crc32(self.read(pages[: self.part_pages]).data)

    def write(self, pages: Sequence[int], content: np.ndarray) -> None:
        """Write content as returned by `read`, in a `buffer`, to claimed pages."""
        pool = self._pool
        shape = (pool.num_layers, 2 * pool.num_kv_heads, len(pages), pool.page_size, pool.head_dim)
        self.wait_for_room()
        with self._on_stream(self._stream):
            moved = torch.from_numpy(content).to(pool.device, non_blocking=True)
            pool.write_pages(self._index(pages), moved.view(pool.cell_dtype).view(shape))

    def share(self) -> PoolHandle | None:
        """Return the pool's handle for one other process; None where it cannot be shared.

        Raises `RuntimeError` for CUDA's errors.
        """
        return share_pool(self._pool)

    def open_peer(self, handle: PoolHandle) -> PeerPool:
        """Map the pool of another process. Raises the errors of `PeerPool.open`."""
        return PeerPool.open(handle, self._pool)

    def write_to(
        self,
        peer: PeerPool,
        pages: Sequence[int],
        own_pages: Sequence[int],
        stored: LayerMarks | None = None,
    ) -> None:
        """Copy the content of kept pages to pages of another process's pool, and wait for the end.
        With the marks `stored` of `launched` ones, each layer is copied once it is stored.

        Raises `ValueError` for pages that it does not have, `RuntimeError` for CUDA's errors.
        """
        with self._on_stream(self._stream if stored is None else self._late_stream):
            peer.write(pages, own_pages, stored)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return torch.tensor(pages, device=self._pool.device)

    @contextmanager
    def _on_stream(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Run work on a stream of its own, on which it does not wait for a step; wait for its end
        at the end of the block.

        The tokens of kept pages have reached the host, so that their KV is there; that of launched
        ones has marks.
        """
        if stream is None:
            with torch.inference_mode():
                yield
            return
        with (
            torch.inference_mode(),
            torch.cuda.device(self._pool.device),
            torch.cuda.stream(stream),
        ):
            try:
                yield
            finally:
                done = torch.cuda.Event(blocking=True)  # a whole forward may be waited for
                done.record()
                done.synchronize()  # later work of other threads is not waited for
