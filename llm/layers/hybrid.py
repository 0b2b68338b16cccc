"""Layers of hybrid models: attention over pages or a recurrent state, then an MLP.

Attention has a gate: output(attention × sigmoid(gate x)), with queries and gates in one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm.batch import LayerCache
from llm.kv_cache.state_pool import StatePool
from llm.layers.decoder import MLP, RMSNorm, SelfAttention
from llm.layers.delta_net import DeltaNet, DeltaRows, activate


@dataclass(frozen=True, slots=True)
class HybridStep:
    """Inputs of the layers of one forward, and what they update."""

    rotations: Tensor  # complex64 [T, 1, D/2]
    cache: LayerCache
    states: StatePool
    rows: DeltaRows


class GatedAttention(SelfAttention):
    """Attention with an output gate; the product is [gates | queries | keys | values] by head."""

    def __call__(self, x: Tensor, rotations: Tensor, cache: LayerCache) -> Tensor:
        """See `SelfAttention`."""
        gates, projected = self.divide(x)
        attended = self.attend(projected, rotations, cache)
        return self.output(attended.view(gates.shape) * activate(torch.sigmoid, gates))

    def divide(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gates [T, H × D], and queries, keys and values [T, H + 2 × Hkv, D] before
        rotation.
        """
        shape = self.shape
        both = self.weights.qkv(x).view(len(x), -1, shape.head_dim)
        gates, projected = both[:, : shape.num_heads], both[:, shape.num_heads :]
        if self.weights.norm is not None:
            self.weights.norm(projected[:, : shape.num_heads + shape.num_kv_heads])
        return gates.flatten(1), projected


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Computes x + mixer(norm x), then x + mlp(norm x)."""

    norm: RMSNorm
    mixer: GatedAttention | DeltaNet
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: Tensor, step: HybridStep) -> None:
        """Update x [T, hidden] in place, and the keys and values or the states of this layer."""
        normed = self.norm(x)
        if isinstance(self.mixer, DeltaNet):
            x.add_(self.mixer(normed, step.states, step.rows))
        else:
            x.add_(self.mixer(normed, step.rotations, step.cache))
        x.add_(self.mlp(self.mlp_norm(x)))
