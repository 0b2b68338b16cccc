"""The attention block: one product for queries, keys and values, rotation, cache, output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from llm.batch import KVCacheInputs
from llm.layers.linear import Linear
from llm.layers.rotary import rotate_
from llm.parallel.group import Group


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of one layer on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class SelfAttention:
    """Grouped-query attention. `qkv` puts out [queries | keys | values] by head."""

    def __init__(
        self, layer: int, shape: AttentionShape, qkv: Linear, output: Linear, group: Group
    ) -> None:
        self._layer = layer
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._qkv = qkv
        self._output = output
        self._group = group

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> Tensor:
        """[T, hidden] to the same."""
        num_heads, num_kv_heads, head_dim = self._sizes
        num_tokens = x.shape[0]
        projected = self._qkv(x).view(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        rotate_(projected[:, : num_heads + num_kv_heads], rotations)
        key_value = projected[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
        attended = cache.attend(self._layer, projected[:, :num_heads], key_value)
        return self._group.all_reduce(self._output(attended))
