"""`InvariantLinear`: products on a GPU that do not depend on the number of rows.

BLAS libraries choose their kernel by the shape of the product, and kernels differ in the order of
their sums: in bfloat16 a token gets other logits alone than among 64. Here every sum has one order
(`llm.kernels.invariant`) for any number of rows. `benchmarks.batch_invariance` measures cost and
benefit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm.layers.weight import LinearWeight


class InvariantLinear:
    """A floating-point matrix; see the module."""

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
