"""Where a codec's work goes; without a GPU it stays where it is."""

from __future__ import annotations

import torch

from decoder.devices import on_device, own_stream


def test_nothing_changes_on_a_cpu() -> None:
    """Torch initialises no GPU for it."""
    before = torch.cuda.is_initialized()
    with on_device("cpu"), own_stream("cpu")():
        assert torch.ones(1).device.type == "cpu"
    assert torch.cuda.is_initialized() == before
