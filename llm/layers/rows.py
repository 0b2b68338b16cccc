"""`RowLinear`: products on a CPU in which a row's result does not depend on the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.kernels.cpu.products import LANES, multiply
from llm.layers.weight import LinearWeight


class RowLinear:
    """A matrix as float32, bfloat16, or int8 with a scale for each output.

    `kernels.cpu.products` defines the order of sums. Inputs are float32 or bfloat16 and results
    have the same format; sums are float32.
    """

    def __init__(self, weight: LinearWeight, dtype: torch.dtype) -> None:
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

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        inputs = x.float()
        if self._missing:
            inputs = F.pad(inputs, (0, self._missing))
        if torch.compiler.is_compiling():
            product = torch.ops.sonant.multiply(inputs, self._values, self._scales)
        else:
            product = multiply(inputs.contiguous(), self._values, self._scales)
        return product.to(x.dtype)
