"""The gated MLP of Llama: down(silu(gate x) × up x) (Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.layers.linear import Linear
from llm.parallel.group import Group

# Below this many elements torch runs an elementwise kernel in one piece. Above, it may split it
# over threads anywhere, and the rest of a split is computed by a scalar exponential that rounds
# differently: a token's result would depend on its position in the batch.
UNSPLIT_ELEMENTS = 32768


def row_blocks(x: Tensor, row_size: int) -> tuple[Tensor, ...]:
    """Return views of whole rows, each small enough to be computed in one piece.

    One view of everything on a GPU, and while torch.compile traces, which would compile the caller
    again for each number of blocks.
    """
    if x.is_cuda or torch.compiler.is_compiling() or x.shape[0] * row_size <= UNSPLIT_ELEMENTS:
        return (x,)
    return x.split(max(1, UNSPLIT_ELEMENTS // row_size))


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) × up [T, I] for [T, 2 × I] gate and up; overwrites the gate."""
    gate, up = gate_up.chunk(2, dim=1)
    for block in row_blocks(gate, gate.shape[1]):
        F.silu(block, inplace=True)
    return gate * up


class GatedMLP:
    """Gated MLP; gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, group: Group) -> None:
        self.gate_up = gate_up
        self.down = down
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        return self.group.all_reduce(self.down(silu_and_multiply(self.gate_up(x))))
