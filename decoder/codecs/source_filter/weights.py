"""Weights of a codec folder: float16, or int8 NAME with float16 NAME:scale, one per first index."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

SCALE = ":scale"


def restored(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 tensors of either format, without the scales."""
    found = {}
    for name, value in stored.items():
        if name.endswith(SCALE):
            continue
        whole, scale = value.float(), stored.get(f"{name}{SCALE}")
        if scale is not None:
            whole = whole * scale.float().view(-1, *(1,) * (value.dim() - 1))
        found[name] = whole
    return found
