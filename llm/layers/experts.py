"""Sparse mixture of experts: each token is computed by a few of many MLPs, and by a shared one if
the model has it.

    x ─┬ router ─ softmax ─ the K largest ─ Σ probability × expert(x) ─ add
       └ shared expert ─ × sigmoid(gate x) ────────────────────────────┘

SeparateExperts   any device: one expert after the other, each for its tokens
GroupedExperts    CUDA: one product for gate and up of all experts, one for down

A token's sum is in an order that other tokens of the batch do not change: that of its experts'
numbers, or on a GPU that of their shares. Ranks have a part of each expert, or some experts whole;
their sums are added at the end. All ranks choose for themselves, and alike: their inputs are sums
that are equal in every bit on all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from llm.kernels.rounding import FLOAT8
from llm.layers.decoder import GatedMLP
from llm.layers.delta_net import activate
from llm.layers.factory import LinearFactory
from llm.layers.linear import Float8Linear, Linear
from llm.layers.weight import LinearWeight
from llm.parallel.group import Group


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of one sparse layer."""

    num_experts: int
    num_chosen: int  # K, experts of a token
    inner_size: int  # of one expert
    shared_size: int  # inner size of the shared expert; 0: there is none
    normalizes: bool  # the K probabilities are divided by their sum

    def num_weights(self, hidden_size: int) -> int:
        """Return the number of weights in the layer's matrices."""
        inner = self.num_experts * self.inner_size + self.shared_size
        return hidden_size * (3 * inner + self.num_experts + (self.shared_size > 0))

    def token_bytes(self, hidden_size: int, width: int, *, is_grouped: bool) -> int:
        """Return the bytes of scratch of a token, in numbers of `width` bytes."""
        inner = 4 * max(self.inner_size, self.shared_size)
        if is_grouped:
            inner = max(inner, self.num_chosen * (3 * self.inner_size + hidden_size))
        return width * (inner + 8 * hidden_size) + 16 * (self.num_experts + self.num_chosen)


class Experts(Protocol):
    """The experts of one rank."""

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden] and the router's logits [T, experts]."""


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The MLP of all tokens, and the gate of its result."""

    mlp: GatedMLP
    gate: Linear  # hidden -> 1

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        gate = activate(torch.sigmoid, self.gate(x))
        return self.mlp(x) * gate


@dataclass(frozen=True, slots=True)
class SparseExperts:
    """The experts in place of an MLP."""

    router: Linear  # hidden -> experts
    experts: Experts
    shared: SharedExpert | None
    group: Group

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        found = self.experts(x, self.router(x))
        if self.shared is not None:
            found.add_(self.shared(x))
        return self.group.all_reduce(found)


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts with a product each. The chosen numbers are needed on the host: no captured forward
    contains it on a GPU.
    """

    shape: ExpertsShape
    first: int  # number of the first of `experts`
    experts: Sequence[GatedMLP]

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Experts`."""
        chosen, shares = choose(logits, self.shape)
        found = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            if not 0 <= number - self.first < len(self.experts):
                continue
            tokens, places = (chosen == number).nonzero(as_tuple=True)
            own = self.experts[number - self.first](x[tokens])
            own.mul_(shares[tokens, places, None].to(x.dtype))
            found.index_add_(0, tokens, own)
        return found


def choose(logits: Tensor, shape: ExpertsShape) -> tuple[Tensor, Tensor]:
    """Return the numbers [T, K] of each token's experts, and their shares float32 [T, K]."""
    probabilities = torch.softmax(logits.float(), dim=1)
    shares, chosen = probabilities.topk(shape.num_chosen, dim=1)
    if shape.normalizes:
        total = shares[:, 0].clone()
        for place in range(1, shares.shape[1]):  # in one order, for any T
            total += shares[:, place]
        shares = shares / total[:, None]
    return chosen, shares


class ExpertMatrix(NamedTuple):
    """One matrix of each expert."""

    values: Tensor  # [experts, out, in] floating point or float8
    scales: Tensor | None = None  # float32 [experts, out], of float8 values

    @classmethod
    def load(
        cls, weights: Iterable[LinearWeight], count: int, factory: LinearFactory
    ) -> ExpertMatrix:
        """Return the matrices of `count` experts on the factory's device, in its format. Each
        weight is read when its turn comes.
        """
        values = scales = torch.empty(0)
        for number, weight in enumerate(weights):
            if number == 0:
                dtype = FLOAT8 if factory.float8 else factory.dtype
                values = torch.empty(count, *weight.shape, dtype=dtype, device=factory.device)
                scales = torch.empty(values.shape[:2], device=factory.device)
            if factory.float8:
                rows = weight.to_float8(factory.device)
                values[number], scales[number] = rows.values, rows.scales
            else:
                values[number] = weight.to_float(factory.dtype)
        return cls(values, scales if factory.float8 else None)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """Experts whose products are computed together, by the kernels of `llm.kernels.experts`."""

    shape: ExpertsShape
    first: int  # number of the first expert of the matrices
    gate_up: ExpertMatrix  # hidden -> 2 × inner
    down: ExpertMatrix  # inner -> hidden

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Experts`."""
        from llm.kernels import experts as kernels  # imports Triton
        from llm.kernels.elementwise import gate
        from llm.kernels.float8 import gate_quantized

        count, num_chosen = len(self.gate_up.values), self.shape.num_chosen
        chosen, shares = kernels.choose_experts(
            logits, num_chosen, normalizes=self.shape.normalizes
        )
        pairs = kernels.sort_pairs(chosen, self.first, count)
        is_float8 = self.gate_up.scales is not None

        def product(
            rows: Tensor, scales: Tensor | None, by: ExpertMatrix, *, gathers: bool
        ) -> Tensor:
            return kernels.multiply_by_expert(
                rows,
                by.values,
                pairs,
                num_chosen,
                gathers=gathers,
                dtype=x.dtype,
                row_scales=scales,
                out_scales=by.scales,
            )

        if is_float8:
            gate_up = product(*Float8Linear.quantize(x), self.gate_up, gathers=True)
            products = product(*gate_quantized(gate_up), self.down, gathers=False)
        else:
            gate_up = product(x, None, self.gate_up, gathers=True)
            products = product(gate(gate_up), None, self.down, gathers=False)
        return kernels.add_pairs(products, chosen, shares, self.first, count)
