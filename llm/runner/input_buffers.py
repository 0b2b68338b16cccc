"""`InputBuffers`: the device memory that captured forwards read, filled without waiting for it.

    host     staging 0 ─┐ pinned
             staging 1 ─┴─ copy ─> device   ids | positions | slots

A copy that is under way reads the staging written last. The next load writes to the other one,
whose copy is a whole step old, so the host has nothing to wait for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NUM_STAGINGS = 2
NUM_COLUMNS = 3  # ids, positions, slots


class Columns(NamedTuple):
    """What one captured forward reads, int64."""

    ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    sampled: Tensor  # [S] the tokens whose logits are wanted


class Staging:
    """int64 values of the host on their way to the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=is_pinned)
        self._values = self._host.numpy()
        self._copied = torch.cuda.Event() if is_pinned else None

    def copy(self, values: np.ndarray, target: Tensor) -> None:
        """Copy values [n] to the head of `target`, behind the work that is queued there."""
        size = len(values)
        if self._copied is not None:
            self._copied.synchronize()  # of the load before the last
        self._values[:size] = values
        target[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class InputBuffers:
    """Columns of up to `max_tokens` tokens, of which `max_sampled` are sampled."""

    def __init__(self, max_tokens: int, max_sampled: int, device: torch.device) -> None:
        size = NUM_COLUMNS * max_tokens + max_sampled
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._stagings = [Staging(size, device) for _ in range(NUM_STAGINGS)]
        self._next = 0
        self._columns: dict[tuple[int, int], Columns] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._device.nbytes

    def columns(self, num_tokens: int, num_sampled: int = 0) -> Columns:
        """Views of the same memory every time."""
        key = num_tokens, num_sampled
        found = self._columns.get(key)
        if found is None:
            size = NUM_COLUMNS * num_tokens
            ids, positions, slots = self._device[:size].view(NUM_COLUMNS, num_tokens)
            sampled = self._device[size : size + num_sampled]
            found = self._columns[key] = Columns(ids, positions, slots, sampled)
        return found

    def load(self, numbers: np.ndarray) -> None:
        """Fill the columns of T tokens with int64 [3 × T + S], one column behind the other."""
        staging = self._stagings[self._next]
        self._next = (self._next + 1) % NUM_STAGINGS
        staging.copy(numbers, self._device)
