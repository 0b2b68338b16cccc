"""`DeviceStream`: a device's queue of work, and results that reach the host later.

    host    launch(forward) launch(sample) download ─ … plans the next batch … ─ wait
    device          └────── forward ─> sample ─> copy to the host ─────────────────^

Work runs in launch order. A launch returns a handle of its result: later work may read the value,
the host must wait for it first. A CPU runs all work immediately, so that the value is available at
once; code that uses a stream must not rely on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llm.memory.transfer import wait_for

T = TypeVar("T")


class PendingResult(Generic[T]):
    """Result of launched work. `value` may be read by work that is launched later."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: list[T] = []

    def put(self, value: T) -> None:
        """Set the value after the work has run or has been queued."""
        self._value.append(value)

    @property
    def value(self) -> T:
        """Return the value; raises `RuntimeError` before the work has run, and when it failed."""
        if not self._value:
            raise RuntimeError("the work that yields this value has not run")
        return self._value[0]


class HostCopy(ABC):
    """Copy of a tensor to the host that may be in progress."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Return the tensor in host memory. Raises the error of the work. May be called again."""


class DeviceStream(ABC):
    """One queue of work of one device."""

    is_asynchronous: bool

    @abstractmethod
    def launch(self, work: Callable[[], T]) -> PendingResult[T]:
        """Run `work` behind everything that was launched before."""

    @abstractmethod
    def download(self, source: PendingResult[Tensor]) -> HostCopy:
        """Copy a launched tensor to the host, behind everything that was launched before.

        No later work may write to it.
        """

    def use_device(self) -> None:  # noqa: B027 (a CPU needs no such call)
        """Make the device the current one of the calling thread."""

    def is_alive(self) -> bool:
        """Whether the device can run more work after an error."""
        return True


class ImmediateStream(DeviceStream):
    """Stream of the CPU: work is done when `launch` returns."""

    is_asynchronous = False

    def launch(self, work: Callable[[], T]) -> PendingResult[T]:
        """See `DeviceStream`."""
        launched: PendingResult[T] = PendingResult()
        launched.put(work())
        return launched

    def download(self, source: PendingResult[Tensor]) -> HostCopy:
        """See `DeviceStream`."""
        return _HostResult(source.value)


class _HostResult(HostCopy):
    is_ready = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor.cpu()


class CudaStream(DeviceStream):
    """A GPU's current stream, and a second stream that copies results to pinned memory.

        current     ═══ n ═══╪════ n + 1 ════╪═══
        copies               └─ tokens of n  └─ tokens of n + 1      an event behind each

    Later launches do not wait for a copy.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda", 0) if device is None else device
        self._copies = torch.cuda.Stream(self._device)

    def launch(self, work: Callable[[], T]) -> PendingResult[T]:
        """See `DeviceStream`: kernels are queued, and later work may read their outputs."""
        self.use_device()
        launched: PendingResult[T] = PendingResult()
        launched.put(work())
        return launched

    def use_device(self) -> None:
        """See `DeviceStream`."""
        torch.cuda.set_device(self._device)

    def is_alive(self) -> bool:
        """Whether the context is intact: after an error in a kernel every later call raises it
        again.
        """
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def download(self, source: PendingResult[Tensor]) -> HostCopy:
        """See `DeviceStream`. Each copy has its own memory for as long as it is referenced."""
        tensor, computed, copied = source.value, torch.cuda.Event(), torch.cuda.Event()
        target = torch.empty_like(tensor, device="cpu", pin_memory=True)
        computed.record()
        self._copies.wait_event(computed)
        with torch.cuda.stream(self._copies):
            target.copy_(tensor, non_blocking=True)
        copied.record(self._copies)
        return _Pinned(target, copied, tensor)


class _Pinned(HostCopy):
    """Copy to pinned memory. `source` is referenced so that its memory is not reused before the
    copy.
    """

    def __init__(self, tensor: Tensor, event: torch.cuda.Event, source: Tensor) -> None:
        self._tensor = tensor
        self._event = event
        self._source = source

    @property
    def is_ready(self) -> bool:
        return self._event.query()

    def wait(self) -> Tensor:
        wait_for(self._event)
        return self._tensor


def create_stream(device: torch.device) -> DeviceStream:
    """Create the stream that pipelines run their steps on."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream()
