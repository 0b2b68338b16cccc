"""What a decoder-only model is made of: the layers between embedding and logits, and the head.

`DecoderLayer` and `LogitsHead` say what is computed, in torch. `create_stack` chooses how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from llm.batch import KVCacheInputs
from llm.kernels.registry import KernelSet
from llm.layers.activation import GatedMLP
from llm.layers.attention import SelfAttention
from llm.layers.linear import Linear
from llm.layers.norm import RMSNorm


class Layer(Protocol):
    """What a model calls for each of its layers."""

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """Changes x [T, hidden] in place."""


class Head(Protocol):
    """What a model calls for the tokens whose logits are wanted."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, hidden] of the last layer to float32 logits [R, V], in `out` where it is given."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x + attention(norm x), then x + mlp(norm x)."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """See `Layer`."""
        self.finish(x, self.attention.attend(self.project(x), rotations, cache))

    def project(self, x: Tensor) -> Tensor:
        """What precedes attention: queries, keys and values [T, H + 2 × Hkv, D]."""
        return self.attention.project(self.attention_norm(x))

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """What follows it: x changes by the output of attended [T, H × D], then by the MLP."""
        x.add_(self.attention.output(attended))
        x.add_(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """head(norm x)."""

    norm: RMSNorm
    linear: Linear

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Head`."""
        logits = self.linear(self.norm(hidden))
        return logits.float() if out is None else out.copy_(logits)


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers and head as they will be called, and how many products own kernels take over."""

    layers: tuple[Layer, ...]
    head: Head | None
    num_own_products: int = 0


def create_stack(
    layers: Sequence[DecoderLayer],
    head: LogitsHead | None,
    kernels: KernelSet,
    *,
    is_compiled: bool = False,
) -> Stack:
    """The same computation through torch.compile, by own kernels, or (without any) as written."""
    if is_compiled:
        from llm.layers.compiled import CompiledLayer, Compiler

        compiler = Compiler()
        return Stack(tuple(CompiledLayer(layer, compiler) for layer in layers), head)
    if not kernels:
        return Stack(tuple(layers), head)
    from llm.layers.fused import FusedHead, FusedLayer

    fused = tuple(FusedLayer(layer, kernels) for layer in layers)
    num_own = sum(layer.num_own_products for layer in fused)
    if head is None:
        return Stack(fused, None, num_own)
    fused_head = FusedHead(head, kernels)
    return Stack(fused, fused_head, num_own + fused_head.num_own_products)
