"""Linear layers: y = x Wᵀ, or x Wᵀ + b, in floating point or with int8 weights.

A row's result does not depend on how many rows it is computed with (see each class), so that a
token gets the same logits alone, in a batch, and in a prompt chunk.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.int8 import (
    ExactInt8Linear,
    PackedInt8Linear,
    Scratch,
    has_integer_kernels,
)
from llm.layers.invariant import InvariantLinear
from llm.layers.weight import LinearWeight
from llm.lora.manager import LoRAManager

ROW_TILE = 8


class Linear(Protocol):
    """What models call."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out]."""


class FloatLinear:
    """A floating-point matrix.

    BLAS libraries compute a few rows with other kernels than many, whose sums round differently.
    On the CPU the rows are therefore padded to whole tiles: the same kernel serves every count.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = weight.to_float(dtype).to(device).contiguous()
        self.out_features, self.in_features = self.weight.shape
        self._pads = device.type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        num_rows = len(x)
        missing = -num_rows % ROW_TILE
        if missing == 0 or not self._pads:
            return F.linear(x, self.weight)
        return F.linear(F.pad(x, (0, 0, 0, missing)), self.weight)[:num_rows]


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
BACKENDS: dict[type, str] = {
    FloatLinear: TORCH_BLAS,
    ExactInt8Linear: "int8 in integers",
    PackedInt8Linear: "packed int8",
    InvariantLinear: "one order of sums",
}


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
        `batch_invariant` does the same for products that are one row's own; the CPU's all are.
        """
        self._is_invariant = batch_invariant and device.type == "cuda"
        self._lora = lora
        self.vendor_blas = vendor_blas
        self.counts: Counter[str] = Counter()  # layers made, by what computes their products
        self.dtype = dtype
        self.device = device
        self.int8 = int8
        self._scratch = Scratch()

    def linear(self, weight: LinearWeight) -> Linear:
        """The layer for a weight."""
        layer: Linear = self._product(weight)
        self.counts[BACKENDS[type(layer)]] += 1
        if weight.bias is not None:
            layer = BiasedLinear(layer, self.vector(weight.bias))
        lora = self._lora
        if lora is None or not any(lora.adapts(source.name) for source in weight.sources):
            return layer
        from llm.layers.adapted import AdaptedLinear

        return AdaptedLinear(layer, weight.sources, lora, self.dtype, self.device)

    def _product(self, weight: LinearWeight) -> Linear:
        if self._is_invariant:
            return InvariantLinear(weight, self.dtype, self.device)
        if not self.int8 or self.vendor_blas:
            return FloatLinear(weight, self.dtype, self.device)
        if has_integer_kernels():
            return ExactInt8Linear(weight, self._scratch)
        return PackedInt8Linear(weight)

    def vector(self, values: Tensor) -> Tensor:
        """A weight that is not a matrix."""
        return values.to(self.device, self.dtype)
