"""Linear layers: y = x Wᵀ, or x Wᵀ + b, in floating point or with quantised weights.

FloatLinear       any device: torch's BLAS
RowLinear         CPU: one order of sums, float32, bfloat16, int8, float8 or groups
InvariantLinear   GPU: one order of sums
PackedLinear      GPU: 4 or 8 bits in groups
Float8Linear      any device: float8 weights and inputs, torch's BLAS or one order of sums
BiasedLinear      any of them, plus a vector

With float8 weights the inputs are rounded to float8, too (`quantize_rows`). The products of the
rounded numbers are summed in float32 (by BLAS in the tensor cores, with fewer bits), and
multiplied by the scales of the output and of the row.

`layers.factory` chooses one. With one order of sums a row's result does not depend on the number of
rows, so that a token gets the same logits alone, in a batch, and in a prompt chunk.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.kernels.rounding import FLOAT8, Float8Rows, ScaledProduct, quantize_rows
from llm.kernels.words import Words
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
    """A matrix on a CPU, as float32, bfloat16, int8 or float8 with a scale for each output, or in
    groups (see `Groups`) if the weight is.

    `kernels.cpu.products` defines the order of sums. Inputs are float32 or bfloat16 and results
    have the same format; sums are float32. With a float8 matrix inputs are rounded to float8.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype) -> None:
        from llm.kernels.cpu.products import LANES, multiply  # imports LLVM: not needed on a GPU

        self._scales: Tensor | None = None
        self._minimums: Tensor | None = None
        if weight.groups is not None:
            groups = weight.groups
            values, self._scales, self._minimums = groups.values, groups.scales, groups.minimums
        elif dtype is torch.int8:
            values, self._scales = weight.to_int8()
        elif dtype is FLOAT8:
            values, self._scales = weight.to_float8(torch.device("cpu"))
        else:
            values = weight.to_float(dtype)
        self.out_features, self.in_features = weight.shape
        self._missing = -self.in_features % LANES
        if self._missing:
            values = F.pad(values, (0, self._missing))
        self._values = values.contiguous()  # shared with the embedding, if the head is tied
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        rows = quantize_rows(x) if self._values.dtype is FLOAT8 else None
        inputs = x.float() if rows is None else rows.values.float()
        if self._missing:
            inputs = F.pad(inputs, (0, self._missing))
        multiply = torch.ops.sonant.multiply if torch.compiler.is_compiling() else self._multiply
        product: Tensor = multiply(inputs.contiguous(), self._values, self._scales, self._minimums)
        return (product if rows is None else product.mul_(rows.scales[:, None])).to(x.dtype)


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


class PackedLinear:
    """A matrix in groups on a GPU, multiplied by `llm.kernels.packed`."""

    def __init__(self, weight: Words, *, is_invariant: bool = False) -> None:
        """`is_invariant`: one kernel computes the product of any number of rows, and a row's result
        is its own.
        """
        from llm.kernels.packed import multiply_packed

        self.weight = weight
        self.out_features, self.in_features = self.weight.shape
        self.is_invariant = is_invariant
        self._multiply = multiply_packed

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if torch.compiler.is_compiling():
            words = self.weight
            product: Tensor = torch.ops.sonant.multiply_packed(
                x,
                words.values,
                words.scales,
                words.minimums,
                words.bits,
                words.shape,
                self.is_invariant,
            )
            return product
        out = x.new_empty(len(x), self.out_features)
        self._multiply(x.contiguous(), self.weight, out, in_one_order=self.is_invariant)
        return out


class Float8Linear:
    """A float8 matrix with a scale for each output, and inputs that are rounded to float8.

    On a GPU torch's BLAS multiplies where it can: sizes must be multiples of 16. Otherwise, and
    always with `is_invariant`, it is the kernel of `llm.kernels.invariant`, in one order of sums.
    On a CPU torch multiplies the rounded numbers in float32.
    """

    def __init__(
        self,
        weight: LinearWeight,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_invariant: bool = False,
    ) -> None:
        """`dtype` is the format of the results."""
        self.weight, self.scales = weight.to_float8(device)
        self.out_features, self.in_features = self.weight.shape
        self.dtype = dtype
        is_aligned = self.out_features % 16 == self.in_features % 16 == 0
        self.uses_blas = is_aligned and not is_invariant
        self._one = torch.ones((), device=device)

    def __call__(self, x: Tensor | Float8Rows) -> Tensor:
        """See `Linear`; inputs may be rounded already."""
        rows = x if isinstance(x, Float8Rows) else self.quantize(x)
        if not rows.values.is_cuda:
            product = F.linear(rows.values.float(), self.weight.float())
            return product.mul_(self.scales).mul_(rows.scales[:, None]).to(self.dtype)
        if self.uses_blas:
            row_scales, scales = rows.scales[:, None], self.scales[None, :]
            return self._scaled_mm(rows.values, row_scales, scales)
        from llm.kernels.invariant import multiply_rows

        out = rows.values.new_empty(len(rows.values), self.out_features, dtype=self.dtype)
        multiply_rows(rows.values, self.weight, out, rows.scales, self.scales)
        return out

    def multiply(self, rows: Float8Rows) -> ScaledProduct:
        """Return the product without the scales: with one scale of a whole matrix BLAS has faster
        kernels. Needs `uses_blas`.
        """
        if rows.values.is_cuda:
            product = self._scaled_mm(rows.values, self._one, self._one)
        else:
            product = F.linear(rows.values.float(), self.weight.float()).to(self.dtype)
        return ScaledProduct(product, rows.scales, self.scales)

    def _scaled_mm(self, values: Tensor, row_scales: Tensor, scales: Tensor) -> Tensor:
        # Parts of a sum are added with fewer bits than float32 has. The difference is a tenth of
        # that of rounding the inputs to float8.
        weight, dtype = self.weight.t(), self.dtype
        return torch._scaled_mm(
            values, weight, row_scales, scales, out_dtype=dtype, use_fast_accum=True
        )

    @staticmethod
    def quantize(x: Tensor) -> Float8Rows:
        """Round inputs [T, in]."""
        if not x.is_cuda or torch.compiler.is_compiling():
            return quantize_rows(x)
        from llm.kernels.float8 import quantize

        return quantize(x)


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
