"""Common function of the codecs' Triton kernels: the columns of a padded row that are its own."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from decoder.window_inputs import Span


@triton.jit
def own_columns(own: tl.tuple, row: tl.tensor, length: tl.tensor) -> tl.tuple:
    """Return [first, last) of a row; `own` are the `span_arguments`."""
    first, last = 0, length
    if len(own) == 4:
        bounds, scale, start, missing = own
        first = tl.maximum(tl.load(bounds + 2 * row) * scale - start, 0).to(tl.int32)
        last = tl.load(bounds + 2 * row + 1) * scale - missing - start
        last = tl.minimum(last, length).to(tl.int32)
    return first, last


def span_arguments(own: Span | None) -> tuple[Any, ...]:
    """Return a kernel's arguments for a span; empty without padding."""
    if own is None:
        return ()
    bounds: Tensor = own.bounds
    assert bounds.is_contiguous()
    return bounds, own.scale, own.start, own.missing
