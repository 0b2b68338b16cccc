"""Layers through `torch.compile`: all of a layer except rotation and attention.

compiled     norm ─ queries, keys, values           output ─ add ─ norm ─ MLP ─ add
as written                                 └─ rotate, attend ─┘

The second half of a layer with experts stays as it is written: what it computes depends on values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from llm.batch import KVCacheInputs
from llm.kernels.words import Words
from llm.layers.decoder import DecoderLayer, GatedMLP

logger = logging.getLogger(__name__)


@torch.library.custom_op("sonant::multiply", mutates_args=())
def traced_multiply(
    inputs: Tensor, weights: Tensor, scales: Tensor | None, minimums: Tensor | None
) -> Tensor:
    """Compute `kernels.cpu.products.multiply` in a function that torch traces."""
    from llm.kernels.cpu.products import multiply

    return multiply(inputs.contiguous(), weights, scales, minimums)


@traced_multiply.register_fake
def _(inputs: Tensor, weights: Tensor, scales: Tensor | None, minimums: Tensor | None) -> Tensor:
    return inputs.new_empty(inputs.shape[0], weights.shape[0])


@torch.library.custom_op("sonant::multiply_packed", mutates_args=())
def traced_packed(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    bits: int,
    shape: Sequence[int],
    in_one_order: bool,
) -> Tensor:
    """Compute `kernels.packed.multiply_packed` in a function that torch traces."""
    from llm.kernels.packed import multiply_packed

    num_out, num_in = shape
    out = x.new_empty(x.shape[0], num_out)
    words = Words(values, scales, minimums, bits, (num_out, num_in))
    multiply_packed(x.contiguous(), words, out, in_one_order=in_one_order)
    return out


@traced_packed.register_fake
def _(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    minimums: Tensor | None,
    bits: int,
    shape: Sequence[int],
    in_one_order: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], shape[0])


class Compiler:
    """Compiles the functions of one model. If one fails, all of them run uncompiled."""

    def __init__(self) -> None:
        self.has_failed = False
        # Without a GPU torch keeps a guard that belongs to the thread that compiled first, and uses
        # it after the end of that thread, too: an engine's. The thread that loads models stays.
        torch._C._ensureCUDADeviceGuardSet()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, compiled at its first call: without graph breaks, for any number of
        rows.
        """
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        fast: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=True)

        def run(*args: Any) -> Any:
            if not self.has_failed:
                try:
                    return fast(*args)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    self._give_up(error)
            return function(*args)

        return run

    def _give_up(self, error: Exception) -> None:
        self.has_failed = True
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        text = "torch.compile failed, modules run uncompiled (as with use_legacy_module): %s: %s"
        logger.warning(text, type(error).__name__, reason)


class CompiledLayer:
    """Compiled decoder layer; see the module."""

    def __init__(self, reference: DecoderLayer, compiler: Compiler) -> None:
        self._attend = reference.attention.attend
        self._project = compiler.compiled(reference.project)
        is_dense = isinstance(reference.mlp, GatedMLP)
        self._finish = compiler.compiled(reference.finish) if is_dense else reference.finish

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """See `Layer`."""
        self._finish(x, self._attend(self._project(x), rotations, cache))
