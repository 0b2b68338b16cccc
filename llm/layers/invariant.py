"""`InvariantLinear`: products on a GPU that do not depend on how many rows they are computed with.

BLAS libraries choose their kernel by the shape of the product, and kernels differ in the order of
their sums: in bfloat16 a token gets other logits alone than among 64. Here every sum is taken in
one order (`invariant_kernels`), whatever is computed beside it. What that costs, and what it is
worth, `benchmarks.batch_invariance` measures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm.layers.weight import LinearWeight


class InvariantLinear:
    """A floating-point matrix; see the module."""

    def __init__(self, weight: LinearWeight, dtype: torch.dtype, device: torch.device) -> None:
        from llm.layers.invariant_kernels import multiply_rows

        self.weight = weight.to_float(dtype).to(device).contiguous()
        self.out_features, self.in_features = self.weight.shape
        self._multiply_rows = multiply_rows

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        out = x.new_empty(len(x), self.out_features)
        self._multiply_rows(x.contiguous(), self.weight, out)
        return out
