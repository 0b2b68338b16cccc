"""What attention backends take of a device's memory beside the KV pool, known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT_WORKSPACE_BYTES = 128 * 2**20  # partial results of contexts that several blocks share
INT_WORKSPACE_BYTES = 4 * 2**20  # which block computes what
USES = 4  # of those: extending and decoding, launch by launch and captured


def workspace_bytes(name: str, device: torch.device, windows: Sequence[int | None]) -> int:
    """Of the backend that `create_attention_backend` makes for a name; its plans not counted."""
    if device.type != "cuda" or name not in ("auto", "flashinfer"):
        return 0
    num_windows = len(set(windows)) or 1
    return FLOAT_WORKSPACE_BYTES + USES * num_windows * INT_WORKSPACE_BYTES
