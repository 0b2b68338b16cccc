"""Memory of attention backends in addition to the KV pool, known in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llm.memory.transfer import wait_for

MAX_FLOAT_BYTES = 128 * 2**20  # partial results of contexts that several blocks share
TILE_QUERIES = 128  # of the largest tile of FlashInfer's FA2, which shares contexts
TILES = 2  # of a processor: it shares contexts only where there are fewer
MAX_SPLITS = 8  # of a context of a row, in the kernel for many rows
INT_WORKSPACE_BYTES = 4 * 2**20  # assignment of blocks
USES = 4  # of a window: extending and decoding, eager and captured
NUM_STAGINGS = 8  # plans that may be in transfer to the device


class WorkspaceSizes(NamedTuple):
    """Numbers that the size of the workspaces depends on."""

    num_rows: int  # most rows of a captured forward
    num_kv_heads: int
    num_groups: int  # query heads of a KV head
    head_dim: int
    num_processors: int  # of the device

    @property
    def float_bytes(self) -> int:
        """Bytes for partial results: of FlashInfer's tiles, or of all splits of all rows, whose
        query heads take places of a power of two; values, and a maximum and a sum each.
        """
        queries = 1 << (self.num_groups - 1).bit_length()
        tiles = TILES * self.num_processors * TILE_QUERIES * self.num_groups
        splits = self.num_rows * self.num_kv_heads * queries * MAX_SPLITS
        return min(4 * (self.head_dim + 2) * max(tiles, splits), MAX_FLOAT_BYTES)


def workspace_bytes(sizes: WorkspaceSizes, windows: Sequence[int | None]) -> int:
    """Return the size of FlashInfer's workspaces, without its plans."""
    num_windows = len(set(windows)) or 1
    return sizes.float_bytes + USES * num_windows * INT_WORKSPACE_BYTES


def count_processors(device: torch.device) -> int:
    """Return the number of a GPU's processors; 0 where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


class Workspaces:
    """Scratch that a backend's FlashInfer wrappers share: their work runs one after the other.

    A plan is written to pinned memory and sent from there. Several pieces of pinned memory are used
    in turn, so that the host never overwrites a plan that has not been sent, and does not wait.
    """

    def __init__(self, device: torch.device, float_bytes: int) -> None:
        self.floats = torch.zeros(float_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._ints: dict[object, Tensor] = {}
        self._stagings = [
            (
                torch.zeros(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True),
                torch.cuda.Event(),
            )
            for _ in range(NUM_STAGINGS)
        ]
        self._turn = 0

    def give(self, wrapper: Any, use: object) -> None:
        """Have a wrapper work in the memory of its use. Wrappers of one forward have different
        uses.
        """
        if use not in self._ints:
            self._ints[use] = torch.empty(
                INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
            )
        wrapper.reset_workspace_buffer(self.floats, self._ints[use])

    @contextmanager
    def staging(self, wrapper: Any) -> Iterator[None]:
        """Provide pinned memory while the wrapper plans."""
        pinned, was_sent = self._stagings[self._turn]
        self._turn = (self._turn + 1) % NUM_STAGINGS
        wait_for(was_sent)
        wrapper._pin_memory_int_workspace_buffer = pinned
        yield
        was_sent.record()
