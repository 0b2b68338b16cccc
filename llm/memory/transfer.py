"""Transfers from the host to a device without blocking, and waits without a busy interpreter."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; on the CPU return the tensor itself.

    For a GPU it goes through pinned memory, behind the work that is queued there, and the host does
    not wait: a copy from pageable memory would wait for all of that work. torch keeps the pinned
    memory until the copy has been made.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for an event of the device.

    The interpreter lock is released only when the event has not happened yet, because acquiring it
    again takes longer than most of the surrounding calls.
    """
    if not event.query():
        event.synchronize()
