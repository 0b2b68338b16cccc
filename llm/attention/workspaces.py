"""Memory of attention backends in addition to the KV pool, known in advance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llm.memory.transfer import wait_for

FLOAT_WORKSPACE_BYTES = 128 * 2**20  # partial results of contexts that several blocks share
INT_WORKSPACE_BYTES = 4 * 2**20  # assignment of blocks
USES = 4  # of a window: extending and decoding, eager and captured
NUM_STAGINGS = 8  # plans that may be in transfer to the device


def workspace_bytes(windows: Sequence[int | None]) -> int:
    """Return the size of FlashInfer's workspaces, without its plans."""
    num_windows = len(set(windows)) or 1
    return FLOAT_WORKSPACE_BYTES + USES * num_windows * INT_WORKSPACE_BYTES


class Workspaces:
    """Scratch that a backend's FlashInfer wrappers share: their work runs one after the other.

    A plan is written to pinned memory and sent from there. Several pieces of pinned memory are used
    in turn, so that the host never overwrites a plan that has not been sent, and does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.floats = torch.zeros(FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
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
