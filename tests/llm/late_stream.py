"""A device that has done nothing of what it was given before somebody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from llm.runner.device_stream import DeviceStream, HostCopy, Launched

T = TypeVar("T")


class LateStream(DeviceStream):
    """Work is queued, and run in order when a copy behind it is waited for.

    So what the host changes after a launch is changed by the time the work runs, and what the
    host reads without waiting is not there. `fail_next` makes the next work raise on the device.
    """

    is_asynchronous = True

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.log: list[str] = []
        self.fail_next = False
        self.most_queued = 0
        self.done = 0  # pieces of work

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        launched: Launched[T] = Launched()
        fails, self.fail_next = self.fail_next, False

        def run() -> None:
            if fails:
                raise RuntimeError("the device has failed")
            launched.put(work())

        self.log.append("launch")
        self.queue.append(run)
        return launched

    def download(self, source: Launched[Tensor]) -> HostCopy:
        copy = LateCopy(self, source)
        self.queue.append(copy.arrive)
        self.most_queued = max(self.most_queued, len(self.queue))
        return copy

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Do work. What was queued behind work that raised is lost."""
        while not is_done():
            try:
                self.queue.popleft()()
                self.done += 1
            except RuntimeError:
                self.queue.clear()
                raise


class LateCopy(HostCopy):
    """Arrives when the device gets to it."""

    def __init__(self, stream: LateStream, source: Launched[Tensor]) -> None:
        self._stream = stream
        self._source = source
        self._tensor: Tensor | None = None

    def arrive(self) -> None:
        self._tensor = self._source.value.clone()

    @property
    def is_ready(self) -> bool:
        return self._tensor is not None

    def wait(self) -> Tensor:
        self._stream.log.append("wait")
        self._stream.run_until(lambda: self.is_ready)
        assert self._tensor is not None
        return self._tensor
