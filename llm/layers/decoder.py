"""Parts of a decoder-only model: the layers between embedding and logits, and the head.

`DecoderLayer` and `LogitsHead` define the computation in torch. `create_stack` selects
implementations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llm.batch import KVCacheInputs
from llm.layers.activation import GatedMLP
from llm.layers.attention import SelfAttention
from llm.layers.linear import Linear
from llm.layers.norm import RMSNorm


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """Update x [T, hidden] in place."""


class Head(Protocol):
    """The head of a model, applied to the tokens whose logits are computed."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] of [R, hidden] of the last layer, in `out` if given."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Computes x + attention(norm x), then x + mlp(norm x)."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """See `Layer`."""
        self.finish(x, self.attention.attend(self.project(x), rotations, cache))

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values [T, H + 2 × Hkv, D]."""
        return self.attention.project(self.attention_norm(x))

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """Add to x the output of attended [T, H × D], then the MLP."""
        x.add_(self.attention.output(attended))
        x.add_(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """Computes head(norm x)."""

    norm: RMSNorm
    linear: Linear

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Head`."""
        logits = self.linear(self.norm(hidden))
        return logits.float() if out is None else out.copy_(logits)
