"""Linear layers: y = x Wᵀ, or x Wᵀ + b, in floating point or with int8 weights.

With `RowLinear` (CPU) and `InvariantLinear` (GPU) a row's result does not depend on how many rows
it is computed with, so a token gets the same logits alone, in a batch, and in a prompt chunk.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.invariant import InvariantLinear
from llm.layers.weight import LinearWeight
from llm.lora.manager import LoRAManager

if TYPE_CHECKING:
    from llm.layers.rows import RowLinear


class Linear(Protocol):
    """What models call."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""


class FloatLinear:
    """A floating-point matrix that torch's BLAS multiplies.

    BLAS libraries choose their kernel by the number of rows, and kernels round differently.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = weight.to_float(dtype).to(device).contiguous()
        self.out_features, self.in_features = self.weight.shape

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight)


class BiasedLinear:
    """Another layer's product plus a vector, which is added last: sums stay what they are."""

    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product = product
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.product(x).add_(self.bias)


TORCH_BLAS = "torch BLAS"
OWN_KERNELS = "own kernels for few rows"  # and torch's BLAS for many
ONE_ORDER = "one order of sums"


class LinearFactory:
    """Makes the layers of one model: int8 (rounded now unless it is int8 already) or `dtype`."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool,
        vendor_blas: bool = False,
        batch_invariant: bool = False,
        lora: LoRAManager | None = None,
    ) -> None:
        """With `lora`, layers that an adapter changes can be adapted; others stay what they are.

        `vendor_blas` expands int8 matrices, so that torch's BLAS computes every product.
        `batch_invariant` makes a row's result its own on a GPU, too; on a CPU it always is, unless
        `vendor_blas` is on.
        """
        self._is_invariant = batch_invariant and device.type == "cuda"
        self._sums_rows = device.type == "cpu" and not vendor_blas
        self._lora = lora
        self.counts: Counter[str] = Counter()  # layers made, by what computes their products
        self.dtype = dtype
        self.device = device
        self.int8 = int8

    def linear(self, weight: LinearWeight) -> Linear:
        """The layer for a weight."""
        layer = self._product(weight)
        self.counts[TORCH_BLAS if isinstance(layer, FloatLinear) else ONE_ORDER] += 1
        if weight.bias is not None:
            layer = BiasedLinear(layer, self.vector(weight.bias))
        lora = self._lora
        if lora is None or not any(lora.adapts(source.name) for source in weight.sources):
            return layer
        from llm.layers.adapted import AdaptedLinear

        return AdaptedLinear(layer, weight.sources, lora, self.plain)

    def plain(self, weight: LinearWeight) -> Linear:
        """A matrix of an adapter, in floating point."""
        if self._sums_rows:
            return self._row_linear(weight, self.dtype)
        return FloatLinear(weight, self.dtype, self.device)

    def _product(self, weight: LinearWeight) -> Linear:
        if self._is_invariant:
            return InvariantLinear(weight, self.dtype, self.device)
        if self.int8 and self._sums_rows:
            return self._row_linear(weight, torch.int8)
        return self.plain(weight)

    def _row_linear(self, weight: LinearWeight, dtype: torch.dtype) -> RowLinear:
        from llm.layers.rows import RowLinear  # imports LLVM, which a GPU does without

        return RowLinear(weight, dtype)

    def vector(self, values: Tensor) -> Tensor:
        """A weight that is not a matrix."""
        return values.to(self.device, self.dtype)
