"""How far two computations of the same numbers are apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Numbers = Tensor | np.ndarray | Sequence[float]


def error(found: Numbers, expected: Numbers) -> float:
    """The largest difference, in parts of the largest of the expected numbers; 0 of none at all."""
    one, other = (torch.as_tensor(numbers).detach().double() for numbers in (found, expected))
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max()) if other.numel() else 0.0
