"""Host memory that a GPU reads and writes beside the host: kept, never allocated for a call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 4096
PIECES = 2  # of pinned memory of a size, beforehand: for one call that runs and one that is next
STAGES = 4  # how many copies to the device may be on their way


class StageBuffer(NamedTuple):
    """The same memory twice."""

    tensor: Tensor  # int64 [rows, width]; pinned, where a GPU reads it
    numbers: np.ndarray


class Staging:
    """Buffers that are used in turn, so that a device may still copy what came before."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        on_gpu = device != "cpu"
        tensors = [
            torch.zeros((rows, width), dtype=torch.int64, pin_memory=on_gpu) for _ in range(STAGES)
        ]
        self._buffers = [StageBuffer(tensor, tensor.numpy()) for tensor in tensors]
        self._events = [torch.cuda.Event() for _ in tensors] if on_gpu else []
        self._current = 0

    def next(self) -> StageBuffer:
        """The buffer that was used longest ago; waits until it has been copied."""
        self._current = (self._current + 1) % STAGES
        if self._events:
            self._events[self._current].synchronize()
        return self._buffers[self._current]

    def note_copy(self) -> None:
        """The newest buffer's copy has been queued on the current stream."""
        if self._events:
            self._events[self._current].record()


class PinnedPool:
    """Memory for what comes from a device; whoever took some gives it back when it is read."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def fill(self, most: int) -> None:
        """Have memory for results of up to so many bytes from now on: allocating it takes time."""
        size = LEAST_BYTES
        while size <= _rounded(most):
            self._free[size] = [_pinned(size) for _ in range(PIECES)]
            size *= 2

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A place for these rows, and the memory it lies in, which is to be given back."""
        size = _rounded(rows.nbytes)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else _pinned(size)
        return memory[: rows.nbytes].view(rows.dtype).view(rows.shape), memory

    def give_back(self, memory: Tensor) -> None:
        """What `take` gave."""
        self._free[len(memory)].append(memory)


def _rounded(num_bytes: int) -> int:
    """To a power of two."""
    return max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
