"""`RMSNorm` (Zhang & Sennrich 2019): x / √(mean(x²) + ε) × w, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """[T, hidden] to the same. The input is left alone."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight = weight
        self._epsilon = epsilon
        self._inverse_size = 1.0 / weight.numel()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        wide = x.float()
        # Four small calls on [T, 1] are cheaper than one more pass over [T, hidden].
        scale = torch.linalg.vector_norm(wide, 2.0, 1, True)
        scale.square_().mul_(self._inverse_size).add_(self._epsilon).rsqrt_()
        return torch.mul(wide, scale).to(x.dtype).mul_(self.weight)
