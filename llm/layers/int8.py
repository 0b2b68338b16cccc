"""Weight-only int8 products on the CPU: int8 rows with one scale each, float32 in and out.

`ExactInt8Linear` computes in integers, with activations split into two 7-bit digits:

    x = a/63 × (h + l/64)    h = round(63 x/a) in [−63, 63], l = 64 (63 x/a − h) in [−32, 32]
    y = a/63 × (Wh + Wl/64)  one integer product for both digits, stacked as rows

a is the row's absolute maximum, so activations keep about 13 bits: more than bfloat16 has. Integer
sums have no rounding, hence no order: a row's result cannot depend on its neighbours. The digits
are small enough for 16-bit saturating multiply-adds (AVX2 without VNNI): 2 × 127 × 127 < 2¹⁵.

The kernel (FBGEMM behind `quantized::linear_dynamic`) derives its own activation scale from the
smallest and largest input. A first row that holds exactly −64 and 63 makes that scale 1.

`PackedInt8Linear` is torch's kernel with bfloat16 activations, for processors without FBGEMM; where
both run it is the slower one, most of all for many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.weight import LinearWeight

HIGH_MAX = 63.0
LOW_BASE = 64.0  # a power of two: scaling by it is exact
SMALLEST = 1e-30  # keeps an all-zero row from dividing by zero
VECTOR_INPUTS = 32
ROW_BLOCK = 128  # rows computed at once, so that the workspace stays in the cache


def has_integer_kernels() -> bool:
    """Whether this build of torch has FBGEMM (x86)."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


@dataclass(frozen=True, slots=True)
class _Digits:
    """Room for both digits of T rows; the tensors are views of one buffer."""

    rows: Tensor  # [1 + 2T, in] the calibrating row, then the high and the low digits
    both: Tensor  # [2, T, in]
    high: Tensor  # [T, in]
    low: Tensor  # [T, in]
    sizes: list[int]  # 1, T, T: how `rows` splits


class Scratch:
    """Buffers that the int8 layers of one model share: one layer runs at a time."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._digits: dict[tuple[int, int], _Digits] = {}

    def digits(self, num_rows: int, in_features: int) -> _Digits:
        """Room for `num_rows` ≤ `ROW_BLOCK` rows."""
        key = (num_rows, in_features)
        found = self._digits.get(key)
        if found is None:
            found = self._digits[key] = self._create(num_rows, in_features)
        return found

    def _create(self, num_rows: int, in_features: int) -> _Digits:
        if in_features not in self._buffers:
            buffer = torch.zeros(1 + 2 * ROW_BLOCK, in_features)
            buffer[0, 0], buffer[0, 1] = -64.0, 63.0
            self._buffers[in_features] = buffer
        rows = self._buffers[in_features][: 1 + 2 * num_rows]
        both = rows[1:].view(2, num_rows, in_features)
        return _Digits(rows, both, both[0], both[1], [1, num_rows, num_rows])


class ExactInt8Linear:
    """See the module. Needs `has_integer_kernels()`."""

    def __init__(self, weight: LinearWeight, scratch: Scratch) -> None:
        values, scales = weight.to_int8()
        self.out_features, self.in_features = values.shape
        if self.in_features < 2:
            raise ValueError("an int8 layer needs at least two inputs")
        zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(
            values, scales.double() / HIGH_MAX, zero_points, 0
        )
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        # The bare operator: what torch.ops puts around it costs a tenth of a small product.
        self._product = torch.ops.quantized.linear_dynamic.default._op
        self._scratch = scratch
        self._digit_scales = torch.tensor([HIGH_MAX, HIGH_MAX * LOW_BASE]).view(2, 1, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], float32."""
        num_rows = x.shape[0]
        if num_rows > ROW_BLOCK:
            return torch.cat([self(block) for block in x.split(ROW_BLOCK)])
        digits = self._scratch.digits(num_rows, self.in_features)
        largest = x.abs().amax(1, True).clamp_min_(SMALLEST)
        torch.mul(x, self._digit_scales / largest, out=digits.both)
        digits.low.sub_(digits.high.round_(), alpha=LOW_BASE)
        products = self._product(digits.rows, self._packed, True)
        _, high, low = products.split_with_sizes(digits.sizes)
        return high.add_(low, alpha=1 / LOW_BASE).mul_(largest)


class PackedInt8Linear:
    """torch's int8 × bfloat16 kernel: each row is summed by itself, in one order."""

    def __init__(self, weight: LinearWeight) -> None:
        values, scales = weight.to_int8()
        self.out_features, self.in_features = values.shape
        # The kernel reads whole vectors of inputs and does not look where a row ends.
        self._missing = -self.in_features % VECTOR_INPUTS
        self._values = F.pad(values, (0, self._missing))
        self._scales = scales.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] to [T, out], float32."""
        narrow = x.to(torch.bfloat16)
        if self._missing:
            narrow = F.pad(narrow, (0, self._missing))
        return torch._weight_int8pack_mm(narrow, self._values, self._scales).float()
