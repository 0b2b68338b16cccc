"""Devices of a codec; without a GPU there is no effect."""

from __future__ import annotations

import torch

from decoder.cuda.devices import on_device, own_stream


def test_nothing_changes_on_a_cpu() -> None:
    """torch does not initialise a GPU."""
    before = torch.cuda.is_initialized()
    with on_device("cpu"), own_stream("cpu")():
        assert torch.ones(1).device.type == "cpu"
    assert torch.cuda.is_initialized() == before
