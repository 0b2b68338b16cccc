"""Linear layers: y = x Wᵀ, or x Wᵀ + b, in floating point or with int8 weights.

`layers.factory` chooses one. With `RowLinear` (CPU) and `InvariantLinear` (GPU) a row's result does
not depend on the number of rows, so that a token gets the same logits alone, in a batch, and in a
prompt chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.weight import LinearWeight


class Linear(Protocol):
    """Interface of linear layers."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, out] for x [T, in]."""


class FloatLinear:
    """A floating-point matrix, multiplied by torch's BLAS.

    BLAS libraries choose their kernel by the number of rows, and kernels round differently.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = weight.to_float(dtype).to(device).contiguous()
        self.out_features, self.in_features = self.weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight)


class BiasedLinear:
    """Another layer's product plus a vector, which is added last, so that the sums are
    unchanged.
    """

    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product = product
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.product(x).add_(self.bias)
