"""`KVCacheManager`: which pages a request holds. Claim first, commit as KV fills, release once.

claim    lock the cached prefix, take pages for the rest of the tokens
extend   take pages for positions still to come
commit   put full pages whose KV has been computed into the prefix cache
release  give everything back; committed pages stay cached until the room is needed

    free ──claim──> used ──release──> free, or cached (evictable) ──claim──> used
                                                └──> host ──claim──> used, in another page
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from llm.kv_cache.host_slots import HostStore
from llm.kv_cache.page_node import PageNode
from llm.kv_cache.page_pool import PagePool
from llm.kv_cache.radix_cache import RadixCache


class _Claim:
    """One request's page table, and the cached nodes (a path from the root) it locks.

    `path[i].page == pages[i]`: a request keeps nothing alive but its own pages. A page table
    never changes, it only grows; when somebody else cached the same prefix first, the request
    goes on with its own copy.
    """

    __slots__ = ("pages", "path", "salt")

    def __init__(self, salt: str, pages: Iterable[int], path: list[PageNode]) -> None:
        self.salt = salt
        self.pages = array("i", pages)  # as kernels read it: copied in one piece
        self.path = path


class KVCacheManager:
    """Pages of a pool of `num_pages` (page 0, for padding, included) by request id.

    Not thread-safe: the engine thread owns it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        *,
        host: HostStore | None = None,
    ) -> None:
        """`host`: where cached pages go whose room is needed, and come back from."""
        self._pool = PagePool(num_pages, page_size)
        self._cache = RadixCache(self._pool, host)
        self._caching = enable_prefix_caching
        self._claims: dict[str, _Claim] = {}
        self.page_size = page_size
        self.prefix_hit_tokens = 0
        self.prefix_miss_tokens = 0

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the padding page included: what the KV tensors must hold."""
        return self._pool.num_pages

    @property
    def total_pages(self) -> int:
        """Pages that can hold tokens."""
        return self._pool.total_pages

    @property
    def used_pages(self) -> int:
        """Pages that requests hold; cached pages nobody uses do not count."""
        return self._pool.total_pages - self.available_pages

    @property
    def cached_pages(self) -> int:
        """Pages of the prefix cache that no request uses."""
        return self._cache.evictable_pages

    @property
    def host_pages(self) -> int:
        """Pages of the prefix cache in host memory."""
        return self._cache.host.num_used

    @property
    def num_pages_to_host(self) -> int:
        """Pages copied to host memory, since the start."""
        return self._cache.host.num_saved

    @property
    def num_pages_from_host(self) -> int:
        """Pages that came back from there."""
        return self._cache.host.num_loaded

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones and evictable ones."""
        return self._pool.free_pages + self._cache.evictable_pages

    @property
    def num_claims(self) -> int:
        """Requests that hold pages."""
        return len(self._claims)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def room(self, watermark: float = 1.0) -> int:
        """Pages that can be had without using more than this share of the pool."""
        # The nudge keeps 0.95 × 100 from being 94 pages on account of rounding.
        allowed = min(int(watermark * self.total_pages + 1e-6), self.total_pages)
        return allowed - self.used_pages

    def claim(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        watermark: float = 1.0,
        reads_cache: bool = True,
    ) -> int | None:
        """Bind pages for all of `token_ids`; returns how many of them are cached already.

        At least one token is left to compute, because its logits are needed. None, and nothing
        changed, when the pages cannot be had or the used share of the pool would exceed
        `watermark`.
        """
        if request_id in self._claims:
            raise ValueError(f"request {request_id} has a claim already")
        may_hit = self._caching and reads_cache
        max_hits = (len(token_ids) - 1) // self.page_size if may_hit else 0
        path = self._cache.match(cache_salt, token_ids, max_hits)
        num_on_device = sum(node.is_on_device for node in path)
        num_new = self.pages_for(len(token_ids)) - num_on_device
        num_revived = sum(node.locks == 0 for node in path[:num_on_device])
        if num_revived + num_new > self.room(watermark):
            return None
        self._cache.lock(path)
        taken = self._take(num_new)
        on_host = path[num_on_device:]
        self._cache.restore(on_host, taken[: len(on_host)])
        shared = [node.page for node in path]
        self._pool.retain(shared)
        self._claims[request_id] = _Claim(cache_salt, shared + taken[len(on_host) :], path)
        num_hits = len(path) * self.page_size
        self.prefix_hit_tokens += num_hits
        self.prefix_miss_tokens += len(token_ids) - num_hits
        return num_hits

    def pages(self, request_id: str) -> Sequence[int]:
        """The request's page table, from position 0: a live view that only grows."""
        return self._claims[request_id].pages

    def extend(self, request_id: str, num_positions: int) -> bool:
        """Grow the page table to cover `num_positions`; False, and no change, without room."""
        pages = self._claims[request_id].pages
        missing = self.pages_for(num_positions) - len(pages)
        if missing > self.available_pages:
            return False
        if missing > 0:
            pages.extend(self._take(missing))
        return True

    def commit(self, request_id: str, token_ids: Sequence[int], num_computed: int) -> None:
        """Offer the full pages among the first `num_computed` tokens to the prefix cache.

        The KV of those tokens must have been computed; a token just sampled has none yet.
        """
        claim = self._claims[request_id]
        if num_computed > min(len(token_ids), len(claim.pages) * self.page_size):
            raise ValueError(
                f"{num_computed} computed of {len(token_ids)} tokens in {len(claim.pages)} pages"
            )
        for index, key in self._full_pages(claim, token_ids, num_computed):
            page = claim.pages[index]
            parent = claim.path[-1] if claim.path else None
            node = self._cache.insert(claim.salt, parent, key, page)
            if node.page != page:
                return
            self._cache.lock((node,))
            claim.path.append(node)

    def release(
        self, request_id: str, token_ids: Sequence[int] = (), num_computed: int = 0
    ) -> None:
        """Give up the request's claim; exactly once. Commits like `commit` before."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            raise ValueError(f"request {request_id} has no claim")
        parent = claim.path[-1] if claim.path else None
        for index, key in self._full_pages(claim, token_ids, num_computed):
            parent = self._cache.insert(claim.salt, parent, key, claim.pages[index])
        self._cache.unlock(claim.path)
        self._pool.free(claim.pages)

    def rename(self, request_id: str, new_id: str) -> None:
        """Keep the claim under another id, because the request's own may be used again."""
        if new_id in self._claims:
            raise ValueError(f"request {new_id} has a claim already")
        self._claims[new_id] = self._claims.pop(request_id)

    def _full_pages(
        self, claim: _Claim, token_ids: Sequence[int], num_computed: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Index and tokens of each full page that is not committed yet."""
        size = self.page_size
        if self._caching:
            for index in range(len(claim.path), num_computed // size):
                yield index, tuple(token_ids[index * size : (index + 1) * size])

    def has_claim(self, request_id: str) -> bool:
        """Whether the request holds pages."""
        return request_id in self._claims

    def _take(self, count: int) -> list[int]:
        shortage = count - self._pool.free_pages
        if shortage > 0:
            self._cache.evict(shortage)
        return self._pool.alloc(count)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every reference, lock and count adds up."""
        holders: Counter[int] = Counter()
        locks: Counter[PageNode] = Counter()
        for request_id, claim in self._claims.items():
            if len(set(claim.pages)) != len(claim.pages):
                raise AssertionError(f"request {request_id} holds a page twice")
            if [node.page for node in claim.path] != claim.pages[: len(claim.path)].tolist():
                raise AssertionError(f"request {request_id} locks pages that are not its own")
            holders.update(claim.pages)
            locks.update(claim.path)
        cached = [node for node in self._cache if node.is_on_device]
        holders.update(node.page for node in cached)
        self._pool.check_integrity(holders)
        self._cache.check_integrity(locks)
        if any(holders[node.page] != 1 for node in cached if node.locks == 0):
            raise AssertionError("a page in use can be evicted")

    def __repr__(self) -> str:
        host = f", {self._cache.host!r}" if self._cache.host.num_slots else ""
        return (
            f"KVCacheManager({len(self._claims)} requests hold {self.used_pages} of "
            f"{self.total_pages} pages, {self.cached_pages} cached{host})"
        )
