"""`KVCacheManager`: which pages a request holds. Claim, commit computed pages, release once.

claim    lock the cached prefix, take pages for the rest of the tokens
extend   take pages for positions still to come
commit   put full pages whose KV has been computed into the prefix cache
release  give everything back; committed pages stay cached until the room is needed

For a model with recurrent states a claim also holds one of those, see `state_slots`.

    free ──claim──> used ──release──> free, or cached (evictable) ──claim──> used
                                                └──> host ──claim──> used, in another page
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from llm.kv_cache.host_slots import HostStore
from llm.kv_cache.page_node import PageNode
from llm.kv_cache.page_pool import PagePool
from llm.kv_cache.radix_cache import RadixCache
from llm.kv_cache.state_slots import StatePages, StateSlots
from llm.request import Token


class _Claim:
    """One request's page table, and the cached nodes (a path from the root) that it locks.

    `path[i].page == pages[i]`: a request keeps only its own pages alive. A page table only grows.
    When another request has cached the same prefix first, this request continues with its own copy.
    """

    __slots__ = ("is_transfer", "pages", "path", "salt")

    def __init__(
        self, salt: str, pages: array[int], path: list[PageNode], *, is_transfer: bool = False
    ) -> None:
        self.salt = salt
        self.pages = pages  # an array that kernels can copy in one piece
        self.path = path
        self.is_transfer = is_transfer


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
        num_states: int = 0,
    ) -> None:
        """Create the pages. `host` receives evicted pages of the prefix cache and returns them.

        `num_states` of a `StatePool`; 0: the model keeps keys and values only. A state is that of
        one position, not of a page, so that pages of a model with states are never shared.
        """
        self._pool = PagePool(num_pages, page_size)
        self._cache = RadixCache(self._pool, host)
        self._states = StateSlots(num_states) if num_states else None
        self._caching = enable_prefix_caching and not num_states
        self._claims: dict[str, _Claim] = {}
        self.page_size = page_size
        self.total_pages = self._pool.total_pages
        """Pages that can hold tokens."""
        self.prefix_hit_tokens = 0
        self.prefix_miss_tokens = 0
        self.num_transfers = 0
        """Claims of a `PageTransfer`, which end without a step of the engine."""
        self.num_received = 0
        """Pages of the prefix cache that other engines computed, since the start."""
        self.num_sent = 0
        """Pages that were sent to other engines since the start."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the padding page included: what the KV tensors must hold."""
        return self._pool.num_pages

    @property
    def used_pages(self) -> int:
        """Pages held by requests; cached pages that no request uses do not count."""
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
        """Pages copied to host memory since the start."""
        return self._cache.host.num_saved

    @property
    def num_pages_from_host(self) -> int:
        """Pages copied back from host memory since the start."""
        return self._cache.host.num_loaded

    @property
    def available_pages(self) -> int:
        """Pages that can be claimed now: free and evictable ones."""
        return self._pool.free_pages + self._cache.evictable_pages

    @property
    def available_states(self) -> int | None:
        """Recurrent states that can be claimed now; None for models without states."""
        return None if self._states is None else self._states.free_states

    @property
    def num_claims(self) -> int:
        """Requests that hold pages."""
        return len(self._claims)

    @property
    def transfer_pages(self) -> int:
        """Pages in the claims of a `PageTransfer`; cached ones count once for each."""
        return sum(len(claim.pages) for claim in self._claims.values() if claim.is_transfer)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def room(self, watermark: float = 1.0) -> int:
        """Return how many pages can be claimed without using more than this share of the pool."""
        # The small addend keeps 0.95 × 100 from becoming 94 pages by rounding.
        allowed = min(int(watermark * self.total_pages + 1e-6), self.total_pages)
        return allowed - (self.total_pages - self.available_pages)

    def num_cached(self, token_ids: Sequence[Token], cache_salt: str = "") -> int:
        """Return how many pages of a prompt the prefix cache has, as a hint: it may change at once.

        Callable from any thread.
        """
        most = (len(token_ids) - 1) // self.page_size if self._caching else 0
        return len(self._cache.match(cache_salt, token_ids, most))

    def claim(
        self,
        request_id: str,
        token_ids: Sequence[Token],
        *,
        cache_salt: str = "",
        watermark: float = 1.0,
        reads_cache: bool = True,
        is_transfer: bool = False,
    ) -> int | None:
        """Claim pages for all of `token_ids`; return how many of the tokens are cached.

        At least one token remains to be computed, because its logits are needed. Returns None, and
        changes nothing, when the pages or a state are not available or the used share of the pool
        would exceed `watermark`. `is_transfer`: no sequence's, see `PageTransfer`.
        """
        if request_id in self._claims:
            raise ValueError(f"request {request_id} has a claim already")
        states = self._states
        if states is not None and not states.free_states:
            return None
        may_hit = self._caching and reads_cache
        max_hits = (len(token_ids) - 1) // self.page_size if may_hit else 0
        path = self._cache.match(cache_salt, token_ids, max_hits) if max_hits else []
        num_on_device = sum(node.is_on_device for node in path)
        num_new = self.pages_for(len(token_ids)) - num_on_device
        num_revived = sum(node.locks == 0 for node in path[:num_on_device])
        if num_revived + num_new > self.room(watermark):
            return None
        if path:
            self._cache.lock(path)
        taken = self._take(num_new)
        on_host = path[num_on_device:]
        if on_host:
            self._cache.restore(on_host, taken[: len(on_host)])
        shared = [node.page for node in path]
        if shared:
            self._pool.retain(shared)
        pages = array("i", shared + taken[len(on_host) :])
        if states is not None:
            pages = StatePages.of(pages, states.alloc())
        self._claims[request_id] = _Claim(cache_salt, pages, path, is_transfer=is_transfer)
        num_hits = len(path) * self.page_size
        if is_transfer:
            self.num_transfers += 1
        else:
            self.prefix_hit_tokens += num_hits
            self.prefix_miss_tokens += len(token_ids) - num_hits
        return num_hits

    def pages(self, request_id: str) -> Sequence[int]:
        """The request's page table, from position 0: a live view that only grows."""
        return self._claims[request_id].pages

    def extend(self, request_id: str, num_positions: int) -> bool:
        """Extend the page table to cover `num_positions`; return False, and change nothing, without
        room.
        """
        pages = self._claims[request_id].pages
        missing = self.pages_for(num_positions) - len(pages)
        if missing > self.available_pages:
            return False
        if missing > 0:
            pages.extend(self._take(missing))
        return True

    def commit(self, request_id: str, token_ids: Sequence[Token], num_computed: int) -> None:
        """Add the full pages among the first `num_computed` tokens to the prefix cache.

        The KV of those tokens must have been computed; a token that was just sampled has none yet.
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
        self, request_id: str, token_ids: Sequence[Token] = (), num_computed: int = 0
    ) -> None:
        """Release the request's claim, exactly once. Commits like `commit` first."""
        claim = self._claims.pop(request_id, None)
        if claim is None:
            raise ValueError(f"request {request_id} has no claim")
        parent = claim.path[-1] if claim.path else None
        for index, key in self._full_pages(claim, token_ids, num_computed):
            parent = self._cache.insert(claim.salt, parent, key, claim.pages[index])
        self._cache.unlock(claim.path)
        self._pool.free(claim.pages)
        self.num_transfers -= claim.is_transfer
        if isinstance(claim.pages, StatePages) and self._states is not None:
            self._states.free(claim.pages.state)

    def keep(
        self, request_id: str, name: str, token_ids: Sequence[Token], num_computed: int
    ) -> None:
        """Commit as `commit`, and keep an ended request's claim as a transfer's, under its name."""
        self.commit(request_id, token_ids, num_computed)
        self.rename(request_id, name)
        self._claims[name].is_transfer = True
        self.num_transfers += 1

    def adopt(
        self,
        name: str,
        request_id: str,
        token_ids: Sequence[Token],
        num_computed: int,
        num_received: int,
    ) -> None:
        """Make a transfer's claim a request's, and commit as `commit`.

        `num_received` pages were computed by other engines; their tokens count as cached.
        """
        self.rename(name, request_id)
        self.num_received += num_received
        self._claims[request_id].is_transfer = False
        self.num_transfers -= 1
        self.prefix_hit_tokens += num_computed
        self.prefix_miss_tokens += len(token_ids) - num_computed
        self.commit(request_id, token_ids, num_computed)

    def rename(self, request_id: str, new_id: str) -> None:
        """Move the claim to another id, because the id of the request may be used again."""
        if new_id in self._claims:
            raise ValueError(f"request {new_id} has a claim already")
        self._claims[new_id] = self._claims.pop(request_id)

    def _full_pages(
        self, claim: _Claim, token_ids: Sequence[Token], num_computed: int
    ) -> Iterator[tuple[int, tuple[Token, ...]]]:
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
        """Raise `AssertionError` unless every reference, lock and count is consistent."""
        if self.num_transfers != sum(claim.is_transfer for claim in self._claims.values()):
            raise AssertionError(f"{self.num_transfers} transfers do not match the claims")
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
        if self._states is not None:
            tables = [claim.pages for claim in self._claims.values()]
            self._states.check_integrity(t.state for t in tables if isinstance(t, StatePages))

    def __repr__(self) -> str:
        host = f", {self._cache.host!r}" if self._cache.host.num_slots else ""
        states = "" if self._states is None else f", {self._states!r}"
        return (
            f"KVCacheManager({len(self._claims)} requests hold {self.used_pages} of "
            f"{self.total_pages} pages, {self.cached_pages} cached{host}{states})"
        )
