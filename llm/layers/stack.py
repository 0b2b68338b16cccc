"""`create_stack`: the implementations of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm.kernels.registry import KernelSet
from llm.layers.decoder import DecoderLayer, Head, Layer, LogitsHead


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers and head of a model, and the number of products that built-in kernels compute."""

    layers: tuple[Layer, ...]
    head: Head | None
    num_kernel_products: int = 0


def create_stack(
    layers: Sequence[DecoderLayer],
    head: LogitsHead | None,
    kernels: KernelSet,
    *,
    is_compiled: bool = False,
) -> Stack:
    """Create the layers with torch.compile, with built-in kernels, or (without any) uncompiled."""
    if is_compiled:
        from llm.layers.compiled import CompiledLayer, Compiler

        compiler = Compiler()
        return Stack(tuple(CompiledLayer(layer, compiler) for layer in layers), head)
    if not kernels:
        return Stack(tuple(layers), head)
    from llm.layers.fused import FusedHead, FusedLayer  # imports Triton

    fused = tuple(FusedLayer(layer, kernels) for layer in layers)
    num_own = sum(layer.num_kernel_products for layer in fused)
    if head is None:
        return Stack(fused, None, num_own)
    fused_head = FusedHead(head, kernels)
    return Stack(fused, fused_head, num_own + fused_head.num_kernel_products)
