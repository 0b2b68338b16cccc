"""`StagedMemory`: fixed device memory that the host fills with one copy, without waiting.

    host     staging 0 ─┐ pinned
             staging 1 ─┴─ copy ─> device   | section | section | … |

    memory.begin()                   allow the host to write
    section.take(n)[:] = numbers     each owner of a section fills its own
    memory.send()                    one copy, behind the work that is queued on the stream

A copy in progress reads the staging buffer that was sent last. The next numbers are written to
the other buffer, whose copy was queued a whole step ago, so that the host does not wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.memory.transfer import wait_for

NUM_STAGINGS = 2
ALIGNMENT = 16  # bytes: alignment of sections, as kernels expect of pointers
SENT_IN = 1024  # bytes: copies are multiples of this size, and their views are cached
MAX_VIEWS = 4096  # number of cached views, by size of the copy

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


class Section:
    """An array: `device` has a fixed address; the host's copy is valid between two sends."""

    def __init__(self, memory: StagedMemory, start: int, size: int, dtype: torch.dtype) -> None:
        kind = _NUMPY[dtype]
        end = start + size * kind.itemsize
        self.device: Tensor = memory.device[start:end].view(dtype)
        self._memory = memory
        self._start = start
        self._itemsize = kind.itemsize
        self._hosts = [host[start:end].view(kind) for host in memory.hosts]

    def take(self, count: int | None = None) -> np.ndarray:
        """Return the first `count` numbers (None: all); all of them must be written before `send`.

        Raises `RuntimeError` outside of `begin` and `send`, `ValueError` when `count` is too large.
        """
        host = self._hosts[self._memory.writing]
        if count is not None:
            if count > len(host):
                raise ValueError(f"{count} numbers in a section of {len(host)}")
            host = host[:count]
        self._memory.will_send(self._start + len(host) * self._itemsize)
        return host


class StagedMemory:
    """`num_bytes` on a device. Used from one thread, on one stream.

    Up to `num_stagings` − 1 copies may be in progress while the next one is written.
    """

    def __init__(
        self, num_bytes: int, device: torch.device, num_stagings: int = NUM_STAGINGS
    ) -> None:
        size = _rounded(num_bytes, SENT_IN)
        is_pinned = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._stagings = [
            torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(num_stagings)
        ]
        self._copied = [torch.cuda.Event() for _ in self._stagings] if is_pinned else None
        self.hosts = [staging.numpy() for staging in self._stagings]
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._turn = 0
        self._end = 0  # end of the bytes to be sent
        self._is_open = False

    def section(self, start: int, size: int, dtype: torch.dtype) -> Section:
        """Return a section of `size` numbers from byte `start` on, a multiple of `ALIGNMENT`."""
        return Section(self, start, size, dtype)

    @property
    def writing(self) -> int:
        """Index of the staging buffer that the host writes to. Raises `RuntimeError` outside of
        `begin`.
        """
        if not self._is_open:
            raise RuntimeError("call begin before writing numbers, and send them once")
        return self._turn

    def begin(self) -> None:
        """Begin to write. Numbers that were written and not sent are discarded."""
        if self._copied is not None:
            wait_for(self._copied[self._turn])  # the last copy from this buffer
        self._end, self._is_open = 0, True

    def will_send(self, end: int) -> None:
        """Mark the bytes up to `end` as written."""
        self._end = max(self._end, end)

    def send(self) -> None:
        """Copy the bytes written since `begin`, behind the work that is queued on the stream."""
        turn, size = self.writing, _rounded(self._end, SENT_IN)
        views = self._views.get((turn, size))
        if views is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            views = self._views[turn, size] = (self.device[:size], self._stagings[turn][:size])
        target, source = views
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied[turn].record()
        self._turn, self._is_open = (turn + 1) % len(self._stagings), False


def section_bytes(size: int, dtype: torch.dtype) -> int:
    """Return the size of a section of so many numbers."""
    return _rounded(size * dtype.itemsize, ALIGNMENT)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
