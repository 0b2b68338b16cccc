"""Pinned host memory for transfers, allocated in advance and reused."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decoder.base import AudioDecoder, StreamingOptions

MIN_BYTES = 4096
PIECES = 2  # pieces of pinned memory of a size: for one running call and the next one
STAGES = 16  # number of copies to the device that may be in progress


class StageBuffer(NamedTuple):
    """One buffer as a tensor and as an array."""

    tensor: Tensor  # int64 [rows, width]; pinned for a GPU
    numbers: np.ndarray


class Staging:
    """Buffers that are used in turn, so that earlier copies to a device may be in progress."""

    def __init__(self, rows: int, width: int, device: str) -> None:
        on_gpu = device != "cpu"
        tensors = [
            torch.zeros((rows, width), dtype=torch.int64, pin_memory=on_gpu) for _ in range(STAGES)
        ]
        self._buffers = [StageBuffer(tensor, tensor.numpy()) for tensor in tensors]
        self._events = [torch.cuda.Event() for _ in tensors] if on_gpu else []
        self._current = 0

    def next(self) -> StageBuffer:
        """Return the least recently used buffer; waits until it has been copied."""
        self._current = (self._current + 1) % STAGES
        if self._events:
            self._events[self._current].synchronize()
        return self._buffers[self._current]

    def note_copy(self) -> None:
        """Record that the newest buffer's copy has been queued on the current stream."""
        if self._events:
            self._events[self._current].record()


class PinnedPool:
    """Pool of pinned memory for results of a device; callers return it after reading."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def fill(self, most: int) -> None:
        """Allocate memory for results of up to `most` bytes, because allocating takes time."""
        size = MIN_BYTES
        while size <= _rounded(most):
            self._free[size] = [_pinned(size) for _ in range(PIECES)]
            size *= 2

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tensor for these rows, and its memory, which has to be given back."""
        size = _rounded(rows.nbytes)
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else _pinned(size)
        return memory[: rows.nbytes].view(rows.dtype).view(rows.shape), memory

    def give_back(self, memory: Tensor) -> None:
        """Return memory of `take` to the pool."""
        self._free[len(memory)].append(memory)


def result_bytes(decoder: AudioDecoder, fade: int, options: StreamingOptions) -> int:
    """Return the bytes of the largest call's float32 samples, of streams of these options.

    0 without chunk sizes: a stream's only block has any length.
    """
    if options.chunk_sizes is None:
        return 0
    num_samples = math.ceil(max(options.chunk_sizes) * decoder.spec.samples_per_code) + fade
    return decoder.options.max_batch * num_samples * 4


def _rounded(num_bytes: int) -> int:
    """Round up to a power of two."""
    return max(MIN_BYTES, 1 << (num_bytes - 1).bit_length())


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
