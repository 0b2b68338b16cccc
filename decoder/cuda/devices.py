"""Current device and stream of GPU work.

Kernels of this package are launched on the current device, and a thread begins with the first one;
therefore callers of a codec make the codec's device the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

URGENT = -1  # priority of a stream: its kernels start before those of other streams


def on_device(device: str) -> AbstractContextManager[object]:
    """Return a context manager that makes a decoder's device the current one; no effect on a
    CPU.
    """
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.device(torch.device(device))


def own_stream(device: str, priority: int = 0) -> Callable[[], AbstractContextManager[object]]:
    """Create a stream of a GPU; return a function that makes it and its device current for a
    thread.

    Its work runs in parallel with other streams. No effect on a CPU.
    """
    if device == "cpu":
        return nullcontext
    import torch

    return partial(torch.cuda.stream, torch.cuda.Stream(torch.device(device), priority))
