"""Where work goes on a GPU. Kernels of our own are launched on the current device, and a thread
begins with the first one; so whoever calls a codec makes the codec's device the current one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

URGENT = -1  # of a stream: its kernels are started before those of other streams


def on_device(device: str) -> AbstractContextManager[object]:
    """Makes a decoder's device the current one. On a CPU it does nothing."""
    if device == "cpu":
        return nullcontext()
    import torch

    return torch.cuda.device(torch.device(device))


def own_stream(device: str, priority: int = 0) -> Callable[[], AbstractContextManager[object]]:
    """What takes a thread's work to a new stream of a GPU, which becomes the current device: it
    runs beside what is on other streams. On a CPU it does nothing.
    """
    if device == "cpu":
        return nullcontext
    import torch

    return partial(torch.cuda.stream, torch.cuda.Stream(torch.device(device), priority))
