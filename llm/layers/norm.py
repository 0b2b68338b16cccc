"""`RMSNorm` (Zhang & Sennrich 2019): x / √(mean(x²) + ε) × w in float32, by row or by head."""

from __future__ import annotations

import torch
from torch import Tensor


class RMSNorm:
    """Maps [T, hidden] to [T, hidden]. The input is not changed."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        # x / √(Σx²/K + ε) × w = x / √(Σx² + Kε) × √K w
        size = weight.numel()
        self.gain = (weight.float() * size**0.5).to(weight.dtype)
        self.epsilon = epsilon * size

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row: x / √(Σx² + `epsilon`) × `gain`."""
        # Small calls on [T, 1] are cheaper than one more pass over [T, hidden].
        scale = torch.linalg.vector_norm(x, 2.0, 1, True, dtype=torch.float32)
        scale.mul_(scale).add_(self.epsilon).rsqrt_()
        normalized = torch.mul(x, scale).mul_(self.gain)
        return normalized if x.dtype is torch.float32 else normalized.to(x.dtype)


class HeadNorm:
    """`RMSNorm` of each head's D values, in place. `weight` is [H, D]."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[1]
        self.gain = weight.float() * size**0.5
        self.epsilon = epsilon * size

    def __call__(self, x: Tensor) -> None:
        """Normalise [T, H, D]."""
        scale = torch.linalg.vector_norm(x, 2.0, 2, True, dtype=torch.float32)
        scale.mul_(scale).add_(self.epsilon).rsqrt_()
        x.copy_(torch.mul(x, scale).mul_(self.gain))
