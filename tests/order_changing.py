"""Replacements for products of torch whose order of sums depends on the number of rows.

A BLAS may choose its kernel by the number of rows, and kernels round differently. Whether one does
depends on the processor and the library; these always do, so that a test of equal bits cannot pass
by chance.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

_matmul, _attention = torch.matmul, F.scaled_dot_product_attention
_convolutions = {name: getattr(F, name) for name in ("conv1d", "conv_transpose1d")}


def _cut(size: int, count: int) -> int:
    """Return where `size` summands are split in two, depending on the number of rows."""
    return count * 7 % size


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Compute torch.matmul in two parts whose sizes depend on the number of rows."""
    rows = left.numel() // left.shape[-1]
    cut = _cut(left.shape[-1], rows)
    if left.dim() < 2 or right.dim() < 2 or not cut:
        return _matmul(left, right)
    return _matmul(left[..., :cut], right[..., :cut, :]) + _matmul(
        left[..., cut:], right[..., cut:, :]
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear by `matmul`."""
    product = matmul(x, weight.T)
    return product if bias is None else product + bias


def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Compute attention over keys in an order that depends on the number of batch items."""
    shift = _cut(key.shape[-2], len(query))
    key, value = (tensor.roll(shift, -2) for tensor in (key, value))
    mask = None if attn_mask is None else attn_mask.roll(shift, -1)
    return _attention(query, key, value, attn_mask=mask)


def _convolution(name: str) -> Callable[..., Tensor]:
    plain = _convolutions[name]

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: int, **kwargs: int
    ) -> Tensor:
        channels = x.shape[-2]
        cut = _cut(channels, len(x)) if x.dim() == 3 else 0
        groups = kwargs.get("groups", args[-1] if name == "conv1d" and len(args) == 4 else 1)
        if not cut or groups != 1 or len(args) > 4:
            return plain(x, weight, bias, *args, **kwargs)
        axis = 1 if name == "conv1d" else 0
        first, second = weight.split([cut, channels - cut], axis)
        return plain(x[:, :cut], first, bias, *args, **kwargs) + plain(
            x[:, cut:], second, None, *args, **kwargs
        )

    return convolve


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch's products, attention and convolutions."""
    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for name in _convolutions:
        monkeypatch.setattr(F, name, _convolution(name))
    for owner, names in ((torch, ("matmul", "mm", "bmm")), (Tensor, ("matmul", "__matmul__"))):
        for name in names:
            monkeypatch.setattr(owner, name, matmul)
