"""Linear layers: y = x Wᵀ, or x Wᵀ + b, in floating point or with int8 weights.

FloatLinear       any device: torch's BLAS
RowLinear         CPU: one order of sums, float32, bfloat16 or int8
InvariantLinear   GPU: one order of sums
BiasedLinear      any of them, plus a vector

`layers.factory` chooses one. With one order of sums a row's result does not depend on the number of
rows, so that a token gets the same logits alone, in a batch, and in a prompt chunk.
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


class RowLinear:
    """A matrix on a CPU, as float32, bfloat16, or int8 with a scale for each output.

    `kernels.cpu.products` defines the order of sums. Inputs are float32 or bfloat16 and results
    have the same format; sums are float32.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype) -> None:
        from llm.kernels.cpu.products import LANES, multiply  # imports LLVM: not needed on a GPU

        self._scales: Tensor | None = None
        if dtype is torch.int8:
            values, self._scales = weight.to_int8()
        else:
            values = weight.to_float(dtype)
        self.out_features, self.in_features = values.shape
        self._missing = -self.in_features % LANES
        if self._missing:
            values = F.pad(values, (0, self._missing))
        self._values = values.contiguous()  # shared with the embedding, if the head is tied
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        inputs = x.float()
        if self._missing:
            inputs = F.pad(inputs, (0, self._missing))
        if torch.compiler.is_compiling():
            product = torch.ops.sonant.multiply(inputs, self._values, self._scales)
        else:
            product = self._multiply(inputs.contiguous(), self._values, self._scales)
        return product.to(x.dtype)


class InvariantLinear:
    """A floating-point matrix on a GPU; the order of sums is that of `llm.kernels.invariant`.

    BLAS libraries choose their kernel by the shape of the product, and kernels differ in the order
    of their sums: in bfloat16 a token gets other logits alone than among 64.
    `benchmarks.batch_invariance` measures cost and benefit.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        from llm.kernels.invariant import multiply_rows

        self.weight = weight.to_float(dtype).to(device).contiguous()
        self.out_features, self.in_features = self.weight.shape
        self._multiply_rows = multiply_rows

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = x.new_empty(len(x), self.out_features)
        self._multiply_rows(x.contiguous(), self.weight, out)
        return out


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
