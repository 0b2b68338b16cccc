"""The attention block: one product for queries, keys and values, rotation, cache, output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llm.batch import KVCacheInputs
from llm.layers.linear import Linear
from llm.layers.norm import HeadNorm
from llm.layers.rotary import rotate_
from llm.parallel.group import Group


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """What one layer computes with; `qkv` puts out [queries | keys | values] by head."""

    qkv: Linear
    output: Linear
    norm: HeadNorm | None = None  # of queries and keys, before they are rotated


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class SelfAttention:
    """Grouped-query attention."""

    def __init__(
        self, layer: int, shape: AttentionShape, weights: AttentionWeights, group: Group
    ) -> None:
        self._layer = layer
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._qkv = weights.qkv
        self._norm = weights.norm
        self._output = weights.output
        self._group = group

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> Tensor:
        """[T, hidden] to the same."""
        num_heads, num_kv_heads, head_dim = self._sizes
        num_tokens = x.shape[0]
        projected = self._qkv(x).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        rotated = projected[:, : num_heads + num_kv_heads]
        if self._norm is not None:
            self._norm(rotated)
        rotate_(rotated, rotations)
        key_value = projected[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
        attended = cache.attend(self._layer, projected[:, :num_heads], key_value)
        return self._group.all_reduce(self._output(attended))
