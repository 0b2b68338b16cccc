"""Relative difference of two computations of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Numbers = Tensor | np.ndarray | Sequence[float]


def error(found: Numbers, expected: Numbers) -> float:
    """Return the largest difference relative to the largest expected number; 0 for empty
    tensors.
    """
    one, other = (torch.as_tensor(numbers).detach().double() for numbers in (found, expected))
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max()) if other.numel() else 0.0
