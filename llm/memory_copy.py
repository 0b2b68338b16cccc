"""`to_device`: values of the host for a device that may be busy. `wait_for`: until it is done."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; on the CPU itself.

    For a GPU it goes through pinned memory, behind the work that is queued there, and the host
    does not wait: a copy from ordinary memory would wait for all of that work. torch keeps the
    pinned memory until the copy has been made.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(event: torch.cuda.Event) -> None:
    """Until the device gets there. The interpreter is only given to other threads when it has not
    been there yet: to get it back takes longer than most of the calls around this one.
    """
    if not event.query():
        event.synchronize()
