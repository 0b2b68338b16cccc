"""`StagedMemory`: fixed device memory that the host fills with one copy, and never waits for.

    host     staging 0 ─┐ pinned
             staging 1 ─┴─ copy ─> device   | section | section | … |

    memory.begin()                   the host may write
    section.take(n)[:] = numbers     each owner of a section fills its own
    memory.send()                    one copy, behind the work that is queued on the stream

A copy that is under way reads the staging that was sent last. What is written next goes to the
other one, whose copy is a whole step old, so the host has nothing to wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.memory_copy import wait_for

NUM_STAGINGS = 2
ALIGNMENT = 16  # bytes: of sections, as kernels like their pointers
SENT_IN = 1024  # bytes: copies are made of so many each, and the views that they need are kept
MAX_VIEWS = 4096  # kept, by how much is sent

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


class Section:
    """Neighbouring numbers: `device` stays in place; the host's are there between two sends."""

    def __init__(self, memory: StagedMemory, start: int, size: int, dtype: torch.dtype) -> None:
        kind = _NUMPY[dtype]
        end = start + size * kind.itemsize
        self.device: Tensor = memory.device[start:end].view(dtype)
        self._memory = memory
        self._start = start
        self._itemsize = kind.itemsize
        self._hosts = [host[start:end].view(kind) for host in memory.hosts]

    def take(self, count: int | None = None) -> np.ndarray:
        """The first `count` numbers (None: all), to be written, each of them, and then sent.

        Raises `RuntimeError` outside of `begin` and `send`, `ValueError` for too many.
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

    `num_stagings` − 1 copies may be under way while the next one is written.
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
        self._end = 0  # of what is to be sent
        self._is_open = False

    def section(self, start: int, size: int, dtype: torch.dtype) -> Section:
        """`size` numbers from byte `start` on, a multiple of `ALIGNMENT`."""
        return Section(self, start, size, dtype)

    @property
    def writing(self) -> int:
        """The staging that the host writes to. Raises `RuntimeError` when it may not."""
        if not self._is_open:
            raise RuntimeError("begin before numbers are written, and send them once")
        return self._turn

    def begin(self) -> None:
        """Start to write. What was written and not sent is forgotten."""
        if self._copied is not None:
            wait_for(self._copied[self._turn])  # of what was sent from there last
        self._end, self._is_open = 0, True

    def will_send(self, end: int) -> None:
        """Bytes up to `end` are written."""
        self._end = max(self._end, end)

    def send(self) -> None:
        """Copy what was written since `begin` behind the work that is queued on the stream."""
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
    """What a section of so many numbers takes."""
    return _rounded(size * dtype.itemsize, ALIGNMENT)


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
