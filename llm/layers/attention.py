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
    """Layers of one attention block; the output of `qkv` is [queries | keys | values] by head."""

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
        self.layer = layer
        self.shape = shape
        self.weights = weights
        self.group = group

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self.output(self.attend(self.project(x), rotations, cache))

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values [T, H + 2 × Hkv, D] for x [T, hidden], before
        rotation.
        """
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        projected = self.weights.qkv(x).view(
            x.shape[0], num_heads + 2 * num_kv_heads, self.shape.head_dim
        )
        if self.weights.norm is not None:
            self.weights.norm(projected[:, : num_heads + num_kv_heads])
        return projected

    def attend(self, projected: Tensor, rotations: Tensor, cache: KVCacheInputs) -> Tensor:
        """Rotate and store the result of `project`, and attend: [T, H × D]."""
        num_tokens, _, head_dim = projected.shape
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        rotate_(projected[:, : num_heads + num_kv_heads], rotations)
        key_value = projected[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
        return cache.attend(self.layer, projected[:, :num_heads], key_value)

    def output(self, attended: Tensor) -> Tensor:
        """Return [T, hidden] for attended [T, H × D]."""
        return self.group.all_reduce(self.weights.output(attended))
