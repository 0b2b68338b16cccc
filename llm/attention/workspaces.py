"""What attention backends take of a device's memory beside the KV pool, known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llm.memory_copy import wait_for

FLOAT_WORKSPACE_BYTES = 128 * 2**20  # partial results of contexts that several blocks share
INT_WORKSPACE_BYTES = 4 * 2**20  # which block computes what
USES = 4  # of those: extending and decoding, launch by launch and captured
NUM_STAGINGS = 8  # plans that may be on their way to the device


def workspace_bytes(name: str, device: torch.device, windows: Sequence[int | None]) -> int:
    """Of the backend that `create_attention_backend` makes for a name; its plans not counted."""
    if device.type != "cuda" or name not in ("auto", "flashinfer"):
        return 0
    num_windows = len(set(windows)) or 1
    return FLOAT_WORKSPACE_BYTES + USES * num_windows * INT_WORKSPACE_BYTES


class Workspaces:
    """Scratch that a backend's FlashInfer wrappers share: their work runs one after the other.

    A plan is written to pinned memory and sent from there. Some of that memory is used in turn, so
    that the host never changes a plan that has not been sent, and does not wait for that either.
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
        """The memory of all wrappers with this use. Those of one forward have different ones."""
        if use not in self._ints:
            self._ints[use] = torch.empty(
                INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device
            )
        wrapper.reset_workspace_buffer(self.floats, self._ints[use])

    @contextmanager
    def staging(self, wrapper: Any) -> Iterator[None]:
        """While the wrapper plans."""
        pinned, was_sent = self._stagings[self._turn]
        self._turn = (self._turn + 1) % NUM_STAGINGS
        wait_for(was_sent)
        wrapper._pin_memory_int_workspace_buffer = pinned
        yield
        was_sent.record()
