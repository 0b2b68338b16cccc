"""`LinearFactory`: choice of the implementation of a model's products."""

from __future__ import annotations

from collections import Counter
from copy import copy

import torch
from torch import Tensor

from llm.kernels.rounding import FLOAT8
from llm.layers.adapted import AdaptedLinear
from llm.layers.linear import (
    BiasedLinear,
    Float8Linear,
    FloatLinear,
    InvariantLinear,
    Linear,
    PackedLinear,
    RowLinear,
)
from llm.layers.weight import LinearWeight
from llm.lora.manager import LoRAManager

TORCH_BLAS = "torch BLAS"
BUILT_IN_KERNELS = "built-in kernels for few rows"  # and torch's BLAS for many rows
ONE_ORDER = "one order of sums"
PACKED = "packed matrices, built-in kernels"
BY_EXPERT = "one product for all experts"


class LinearFactory:
    """Creates the layers of one model: int8 or float8 (quantised here unless it is stored so) or
    `dtype`. A weight in groups stays so where kernels of this repository compute the product.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        int8: bool,
        float8: bool = False,
        vendor_blas: bool = False,
        batch_invariant: bool = False,
        lora: LoRAManager | None = None,
    ) -> None:
        """Create a factory. With `lora`, layers that an adapter changes are adapted; others are
        unchanged.

        `vendor_blas` expands int8 matrices, so that torch's BLAS computes every product. With
        `float8` inputs and matrices are float8 whatever computes the product; `head` is not.
        `batch_invariant` makes a row's result independent of the other rows on a GPU, too; on a CPU
        it always is, unless `vendor_blas` is on.
        """
        self._is_invariant = batch_invariant and device.type == "cuda"
        self._sums_rows = device.type == "cpu" and not vendor_blas
        self._reads_words = device.type == "cuda" and not vendor_blas
        self._lora = lora
        self.counts: Counter[str] = Counter()  # number of layers by implementation
        self.dtype = dtype
        self.device = device
        self.int8 = int8
        self.float8 = float8

    def without_adapters(self) -> LinearFactory:
        """Return the factory of layers that no adapter changes; both count in `counts`."""
        other = copy(self)
        other._lora = None
        return other

    def exact(self) -> LinearFactory:
        """Return the factory of small layers that are never int8 or float8: gates and routers."""
        other = copy(self)
        other.int8 = other.float8 = False
        return other

    @property
    def groups_experts(self) -> bool:
        """Whether one product computes all experts of a layer: on a GPU."""
        return self.device.type == "cuda"

    def linear(self, weight: LinearWeight) -> Linear:
        """Create the layer for a weight."""
        layer = self._product(weight)
        self.counts[_backend(layer)] += 1
        if weight.bias is not None:
            layer = BiasedLinear(layer, self.vector(weight.bias))
        lora = self._lora
        if lora is None or not any(lora.adapts(source.name) for source in weight.sources):
            return layer
        return AdaptedLinear(layer, weight.sources, lora, self.plain)

    def head(self, weight: LinearWeight) -> Linear:
        """Create the layer of a model's head, which no adapter changes and which is never float8:
        its rounding goes into the logits as it is.
        """
        other = self.without_adapters()
        other.float8 = False
        return other.linear(weight)

    def plain(self, weight: LinearWeight) -> Linear:
        """Create the layer for an adapter's matrix, in floating point."""
        if self._sums_rows:
            return RowLinear(weight, self.dtype)
        return FloatLinear(weight, self.dtype, self.device)

    def _product(self, weight: LinearWeight) -> Linear:
        if weight.groups is not None and self._reads_words:
            words = weight.groups.to_words(self.device)
            return PackedLinear(words, is_invariant=self._is_invariant)
        if self._sums_rows and (weight.groups is not None or self.float8):
            return RowLinear(weight, FLOAT8 if self.float8 else self.dtype)
        if self.float8:
            is_invariant = self._is_invariant
            return Float8Linear(weight, self.dtype, self.device, is_invariant=is_invariant)
        if self._is_invariant:
            return InvariantLinear(weight, self.dtype, self.device)
        if self.int8 and self._sums_rows:
            return RowLinear(weight, torch.int8)
        return self.plain(weight)

    def vector(self, values: Tensor) -> Tensor:
        """Return a weight that is not a matrix."""
        return values.to(self.device, self.dtype)


def _backend(layer: Linear) -> str:
    """Return the name of what computes a layer's products."""
    if isinstance(layer, PackedLinear):
        return PACKED
    if isinstance(layer, Float8Linear):
        return TORCH_BLAS if layer.uses_blas else ONE_ORDER
    return TORCH_BLAS if isinstance(layer, FloatLinear) else ONE_ORDER
