"""`InputBuffers`: the device memory that captured forwards read, filled without waiting for it.

    host     staging 0 ─┐ pinned
             staging 1 ─┴─ copy ─> device   ids | positions | slots

A copy that is under way reads the staging written last. The next load writes to the other one,
whose copy is a whole step old, so the host has nothing to wait for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NUM_STAGINGS = 2
NUM_COLUMNS = 3  # ids, positions, slots

Columns = tuple[Tensor, Tensor, Tensor]


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
    """Ids, positions and slots of up to `max_rows` decode rows."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        size = NUM_COLUMNS * max_rows
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._stagings = [Staging(size, device) for _ in range(NUM_STAGINGS)]
        self._next = 0
        self._columns: dict[int, Columns] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._device.nbytes

    def columns(self, num_rows: int) -> Columns:
        """Ids, positions and slots, int64 [num_rows] each: views of the same memory every time."""
        found = self._columns.get(num_rows)
        if found is None:
            numbers = self._device[: NUM_COLUMNS * num_rows].view(NUM_COLUMNS, num_rows)
            found = self._columns[num_rows] = numbers[0], numbers[1], numbers[2]
        return found

    def load(self, numbers: np.ndarray) -> None:
        """Fill the columns of N rows with int64 [3, N]."""
        staging = self._stagings[self._next]
        self._next = (self._next + 1) % NUM_STAGINGS
        staging.copy(numbers.reshape(-1), self._device)
