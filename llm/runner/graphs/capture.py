"""`GraphCapture`: capture a piece of device work once, and replay it as one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch


class CapturedWork(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Queue the work again: the same kernels on the same memory with its current contents."""

    def reset(self) -> None:
        """Free the work, which cannot be replayed any more."""


class GraphCapture(ABC):
    """Captures work that writes its results to memory that the caller keeps."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> CapturedWork:
        """Run `work`, then capture it. It must not wait for the device or read values on the host.

        Captured works share their scratch memory, so they must run one after the other.
        """


class CudaCapture(GraphCapture):
    """CUDA graphs. Capture the largest work first: the smaller ones then fit into its memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> CapturedWork:
        """See `GraphCapture`. The first run compiles kernels and allocates the libraries'
        memory.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph
