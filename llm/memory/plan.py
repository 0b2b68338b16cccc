"""`MemoryPlan`: weights + activations + KV pages, computed before anything is allocated.

available_bytes           a share of the device's memory
├── weights_bytes
├── activation_bytes      scratch of one step at its largest
├── graph_bytes           captured decoding: scratch, logits, state of the sampler
├── state_bytes           recurrent states of the sequences, for models that have them
└── kv_bytes              num_pages × page_bytes; page 0 is for padding and holds no request
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

from llm.errors import CapacityError

MIN_PAGES = 2  # the padding page and one that can hold tokens


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Contents of one KV page: `page_size` tokens of keys and values in every layer."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int
    draft_bytes: int = 0  # size of a draft model's page with the same id

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of all layers, and the draft model's."""
        values = self.num_layers * self.page_size * self.num_kv_heads * self.head_dim
        return 2 * values * self.bytes_per_value + self.draft_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of one device's memory. All sizes in bytes."""

    available_bytes: int
    weights_bytes: int
    activation_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int  # with the padding page
    graph_bytes: int = 0
    state_bytes: int = 0

    @classmethod
    def create(  # noqa: PLR0913 - one parameter per part
        cls,
        layout: PageLayout,
        *,
        available_bytes: int,
        weights_bytes: int,
        activation_bytes: int,
        graph_bytes: int = 0,
        state_bytes: int = 0,
        num_pages: int | None = None,
        max_pages: int | None = None,
    ) -> MemoryPlan:
        """Plan for `num_pages`, or (None) all remaining memory up to `max_pages`, for the KV cache.

        `available_bytes` is what this process may use in all, weights included. Raises
        `CapacityError` with all the numbers when memory is insufficient.
        """
        if num_pages is None:
            left = available_bytes - weights_bytes - activation_bytes - graph_bytes - state_bytes
            num_pages = max(left // layout.page_bytes, 0)
            if max_pages is not None:
                num_pages = min(num_pages, max_pages)
        plan = cls(
            available_bytes=available_bytes,
            weights_bytes=weights_bytes,
            activation_bytes=activation_bytes,
            page_bytes=layout.page_bytes,
            page_size=layout.page_size,
            num_pages=num_pages,
            graph_bytes=graph_bytes,
            state_bytes=state_bytes,
        )
        plan._check()
        return plan

    def _check(self) -> None:
        if self.num_pages < MIN_PAGES:
            raise CapacityError(
                f"no room for a KV cache of at least {MIN_PAGES} pages; {self.describe()}; "
                "use a smaller model, a narrower weight encoding, a lower max_batch_size or a "
                "higher device_memory_utilization"
            )
        if self.total_bytes > self.available_bytes:
            raise CapacityError(
                f"memory is insufficient; {self.describe()}; lower kv_cache.num_pages"
            )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of everything that is planned."""
        scratch = self.activation_bytes + self.graph_bytes
        return self.weights_bytes + scratch + self.state_bytes + self.kv_bytes

    @property
    def max_tokens(self) -> int:
        """Number of tokens that the KV cache can hold, of all sequences together."""
        return (self.num_pages - 1) * self.page_size

    def describe(self) -> str:
        """Return one line with every number."""
        states = f"states {_mib(self.state_bytes)} + " if self.state_bytes else ""
        return (
            f"weights {_mib(self.weights_bytes)} + activations {_mib(self.activation_bytes)} + "
            f"graphs {_mib(self.graph_bytes)} + {states}"
            f"{self.num_pages} KV pages of {self.page_size} tokens × {self.page_bytes} bytes "
            f"({_mib(self.kv_bytes)}) of {_mib(self.available_bytes)} available"
        )


def infer_batch_size(plan_for: Callable[[int], MemoryPlan], expected_tokens: int, most: int) -> int:
    """Return the largest number of rows, 1 to `most`, whose `expected_tokens` fit into the pages.

    `plan_for(rows)` plans the memory of batches with so many rows; it may raise `CapacityError`.
    """

    def is_too_many(rows: int) -> bool:
        try:
            plan = plan_for(rows)
        except CapacityError:
            return True
        pages_each = -(-expected_tokens // plan.page_size)
        return rows * pages_each > plan.num_pages - 1

    return max(1, bisect.bisect_left(range(1, most + 1), True, key=is_too_many))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
