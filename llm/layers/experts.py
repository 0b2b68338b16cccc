"""Sparse mixture of experts: each token is computed by a few of many MLPs, and by a shared one.

    x ─┬ router ─ softmax ─ the K largest ─ Σ probability × expert(x) ─ add
       └ shared expert ─ × sigmoid(gate x) ────────────────────────────┘

Experts are computed one after the other, each for its tokens. A token's sum is in the order of its
experts' numbers, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llm.layers.decoder import GatedMLP
from llm.layers.delta_net import activate
from llm.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of one sparse layer."""

    num_experts: int
    num_chosen: int  # K, experts of a token
    inner_size: int  # of one expert
    shared_size: int  # inner size of the shared expert
    normalizes: bool  # the K probabilities are divided by their sum

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of weights in the layer's matrices."""
        inner = self.num_experts * self.inner_size + self.shared_size
        return hidden_size * (3 * inner + self.num_experts + 1)


@dataclass(frozen=True, slots=True)
class SparseExperts:
    """The experts in place of an MLP. It needs the chosen numbers on the host: no captured
    forward contains it.
    """

    shape: ExpertsShape
    router: Linear  # hidden -> experts
    experts: Sequence[GatedMLP]
    shared: GatedMLP
    shared_gate: Linear  # hidden -> 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        chosen, shares = self.choose(x)
        found = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            own = self.experts[number](x[tokens]).mul_(shares[tokens, places, None])
            found.index_add_(0, tokens, own)
        gate = activate(torch.sigmoid, self.shared_gate(x))
        return found.add_(self.shared(x) * gate)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of each token's experts and their shares [T, K]."""
        probabilities = torch.softmax(self.router(x).float(), dim=1)
        shares, chosen = probabilities.topk(self.shape.num_chosen, dim=1)
        if self.shape.normalizes:
            total = shares[:, 0].clone()
            for place in range(1, shares.shape[1]):  # in one order, for any T
                total += shares[:, place]
            shares = shares / total[:, None]
        return chosen, shares.to(x.dtype)
