"""A device that runs no work before its results are waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from llm.runner.device_stream import DeviceStream, HostCopy, PendingResult

T = TypeVar("T")


class LateStream(DeviceStream):
    """A stream that runs queued work in order when a copy behind it is waited for.

    Host changes after a launch are therefore visible to the work, and results that the host reads
    without waiting are missing. `fail_next` makes the next work raise on the device.
    """

    is_asynchronous = True

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.log: list[str] = []
        self.fail_next = False
        self.most_queued = 0
        self.done = 0  # pieces of work

    def launch(self, work: Callable[[], T]) -> PendingResult[T]:
        launched: PendingResult[T] = PendingResult()
        fails, self.fail_next = self.fail_next, False

        def run() -> None:
            if fails:
                raise RuntimeError("the device has failed")
            launched.put(work())

        self.log.append("launch")
        self.queue.append(run)
        return launched

    def download(self, source: PendingResult[Tensor]) -> HostCopy:
        copy = LateCopy(self, source)
        self.queue.append(copy.arrive)
        self.most_queued = max(self.most_queued, len(self.queue))
        return copy

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run work. Work behind one that raised is lost."""
        while not is_done():
            try:
                self.queue.popleft()()
                self.done += 1
            except RuntimeError:
                self.queue.clear()
                raise


class LateCopy(HostCopy):
    """A copy that completes when the device reaches it."""

    def __init__(self, stream: LateStream, source: PendingResult[Tensor]) -> None:
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
