"""`DeviceStream`: a device's order of work, and results that the host learns later.

    host    launch(forward) launch(sample) download ─ … plans the next batch … ─ wait
    device          └────── forward ─> sample ─> copy to the host ─────────────────^

Work runs in the order it was launched. What a launch returns stands for the value: later work may
read it, the host may not before it has waited. A CPU runs all work at once, so there the value is
always known; whoever writes for a stream must not count on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llm.memory_copy import wait_for

T = TypeVar("T")


class Launched(Generic[T]):
    """What some work yields. `value` may be read by work that is launched later."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value: list[T] = []

    def put(self, value: T) -> None:
        """The work has run, as far as the host is concerned."""
        self._value.append(value)

    @property
    def value(self) -> T:
        """Raises `RuntimeError` before the device got there, and when the work failed."""
        if not self._value:
            raise RuntimeError("the work that yields this value has not run")
        return self._value[0]


class HostCopy(ABC):
    """A tensor on its way to the host."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> Tensor:
        """The tensor in host memory. Raises what the work raised. May be called again."""


class DeviceStream(ABC):
    """One queue of one device."""

    is_asynchronous: bool

    @abstractmethod
    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """Run `work` behind everything launched before."""

    @abstractmethod
    def download(self, source: Launched[Tensor]) -> HostCopy:
        """Copy a launched tensor to the host, behind everything launched before.

        Nothing launched later may write to it.
        """

    def is_alive(self) -> bool:
        """Whether the device goes on after work that raised."""
        return True


class ImmediateStream(DeviceStream):
    """The CPU: work is done when `launch` returns."""

    is_asynchronous = False

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """See `DeviceStream`."""
        launched: Launched[T] = Launched()
        launched.put(work())
        return launched

    def download(self, source: Launched[Tensor]) -> HostCopy:
        """See `DeviceStream`."""
        return _OnHost(source.value)


class _OnHost(HostCopy):
    is_ready = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor.cpu()


class CudaStream(DeviceStream):
    """A GPU's current stream, and one beside it that copies results to pinned memory.

        current     ═══ n ═══╪════ n + 1 ════╪═══
        copies               └─ tokens of n  └─ tokens of n + 1      an event behind each

    What is launched next need not wait until a copy has been made.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = torch.device("cuda", 0) if device is None else device
        self._copies = torch.cuda.Stream(self._device)

    def launch(self, work: Callable[[], T]) -> Launched[T]:
        """See `DeviceStream`: kernels are queued, and their outputs may be read by later ones.

        A thread starts out on the first GPU, so each piece of work says where it belongs.
        """
        torch.cuda.set_device(self._device)
        launched: Launched[T] = Launched()
        launched.put(work())
        return launched

    def is_alive(self) -> bool:
        """An error in a kernel breaks the context for good: every later call raises it again."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def download(self, source: Launched[Tensor]) -> HostCopy:
        """See `DeviceStream`. Each copy has memory of its own, as long as it is held."""
        tensor, computed, copied = source.value, torch.cuda.Event(), torch.cuda.Event()
        target = torch.empty_like(tensor, device="cpu", pin_memory=True)
        computed.record()
        self._copies.wait_event(computed)
        with torch.cuda.stream(self._copies):
            target.copy_(tensor, non_blocking=True)
        copied.record(self._copies)
        return _Pinned(target, copied, tensor)


class _Pinned(HostCopy):
    """`source` is held, so that its memory is nobody else's before the copy has been made."""

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
    """The stream that pipelines run their steps on."""
    return CudaStream(device) if device.type == "cuda" else ImmediateStream()
