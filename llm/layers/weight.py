"""`LinearWeight`: a matrix [out, in] in floating point, as int8 or float8 with a scale per output
row, or in groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm.kernels.rounding import FLOAT8, Float8Rows, quantize_rows
from llm.layers.groups import Groups

INT8_MAX = 127


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The checkpoint's module of some output rows, and their order if it differs."""

    name: str
    num_rows: int
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The matrix is `groups` where there are groups, else `values`, times `scales[:, None]` where
    there are scales.
    """

    values: Tensor  # [out, in] floating point; with scales int8 or float8_e4m3fn
    scales: Tensor | None = None  # float32 [out]
    bias: Tensor | None = None  # [out] floating point, added to the product
    sources: tuple[WeightSource, ...] = ()  # of all rows in turn, if known
    groups: Groups | None = None  # whose values are `values`

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        num_out, num_in = self.values.shape
        return (num_out, num_in) if self.groups is None else self.groups.shape

    @property
    def is_quantized(self) -> bool:
        return self.scales is not None or self.groups is not None

    @classmethod
    def stack(cls, weights: list[LinearWeight]) -> LinearWeight:
        """Return one matrix with the outputs of all, so that one product computes them."""
        all_sources = [weight.sources for weight in weights] if _are_known(weights) else []
        groups = [weight.groups for weight in weights if weight.groups is not None]
        scales = [weight.scales for weight in weights if weight.scales is not None]
        is_mixed = len({weight.values.dtype for weight in weights}) > 1 and bool(scales)
        if is_mixed or len(groups) not in (0, len(weights)):
            weights = [cls(w.to_float(torch.float32), bias=w.bias) for w in weights]
            scales, groups = [], []
        stacked = Groups.stack(groups) if groups else None
        values = torch.cat([w.values for w in weights]) if stacked is None else stacked.values
        biases = [weight.bias for weight in weights if weight.bias is not None]
        if len(biases) not in (0, len(weights)):
            raise ValueError("of stacked weights either all have a bias or none")
        return cls(
            values,
            torch.cat(scales) if scales else None,
            torch.cat(biases) if biases else None,
            tuple(source for sources in all_sources for source in sources),
            stacked,
        )

    def rows(self, index: Tensor) -> LinearWeight:
        """Return the output rows `index`, in that order."""
        scales = None if self.scales is None else self.scales[index]
        bias = None if self.bias is None else self.bias[index]
        sources = tuple(
            WeightSource(source.name, len(index), index)
            for source in self.sources
            if source.order is None and len(self.sources) == 1
        )
        groups = None if self.groups is None else self.groups.rows(index)
        values = self.values[index] if groups is None else groups.values
        return LinearWeight(values, scales, bias, sources, groups)

    def to_float(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] in floating point."""
        if self.groups is not None:
            return self.groups.expand().to(dtype)
        if self.scales is None:
            return self.values.to(dtype)
        return (self.values.float() * self.scales[:, None]).to(dtype)

    def to_int8(self) -> tuple[Tensor, Tensor]:
        """Quantise to int8 [out, in] and float32 scales [out]: symmetric, absolute maximum of each
        row.
        """
        if self.scales is not None and self.values.dtype is torch.int8:
            return self.values.contiguous(), self.scales.float()
        values = self.to_float(torch.float32)
        scales = values.abs().amax(dim=1).clamp_(min=1e-12) / INT8_MAX
        return (values / scales[:, None]).round_().to(torch.int8), scales

    def to_float8(self, device: torch.device) -> Float8Rows:
        """Quantise to float8 by `quantize_rows`, on the device, each output row by itself; a float8
        matrix is unchanged.
        """
        if self.groups is not None:
            return quantize_rows(self.to_float(torch.float32).to(device))
        values = self.values.to(device)
        scales = None if self.scales is None else self.scales.to(device)
        if scales is not None and values.dtype is FLOAT8:
            return Float8Rows(values.contiguous(), scales.float())
        return quantize_rows(LinearWeight(values, scales).to_float(torch.float32))


def _are_known(weights: list[LinearWeight]) -> bool:
    return all(weight.sources for weight in weights)
