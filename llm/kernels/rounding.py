"""`quantize_rows`: rows rounded to float8, each with a scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
MIN_MAXIMUM = 1e-12  # of a row: the scale of zeros is not zero


class Float8Rows(NamedTuple):
    """Rows whose values are those of `values` times the row's scale."""

    values: Tensor  # float8_e4m3fn [T, K]
    scales: Tensor  # float32 [T]


class ScaledProduct(NamedTuple):
    """A product of float8 numbers, whose readers multiply it by the scales of both sides."""

    values: Tensor  # [T, N]
    row_scales: Tensor  # float32 [T]
    scales: Tensor  # float32 [N] of the outputs


def quantize_rows(x: Tensor) -> Float8Rows:
    """Round each row of x [T, K] to float8, so that its absolute maximum becomes the largest
    number of the format.

        largest = max(|x|, 1e-12)
        values  = round(x × (448 / largest))
        scale   = largest × (1 / 448)

    The operations are those of float32, and values are rounded to the nearest, ties to even.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=1).clamp_(min=MIN_MAXIMUM)
    # A quotient of a number and a tensor would be the product with a reciprocal, rounded twice.
    inverse = torch.full_like(largest, FLOAT8_MAX).div_(largest)
    return Float8Rows((wide * inverse[:, None]).to(FLOAT8), largest * (1 / FLOAT8_MAX))
