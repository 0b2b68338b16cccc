"""Gated delta net (Yang et al. 2024): layers whose state is one matrix for each head.

    x ─┬ project ─┬ q, k, v ─ convolution ─ silu ─ delta rule ─ norm ─ × ─ output
       │          └ z ─────────────────────── silu ────────────────────┘
       └ gates ─── decay and strength of each head's update

A head's state S [key dim, value dim] maps keys to values. A token decays it, replaces a part of
what S returns for its key by its value, and reads it with its query:

    S ← decay × S;   S ← S + k (strength × (v − kᵀS));   result = qᵀS

Tokens are computed one after the other, all rows of a batch at once. Sums over keys are additions
of halves: their order is that of the shape, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import ForwardBatch
from llm.kv_cache.state_pool import StatePool, StateRows
from llm.layers.decoder import row_blocks
from llm.layers.linear import Linear
from llm.layers.short_conv import ConvWindows, ShortConv
from llm.memory.transfer import to_device

CONV_STATES, DELTA_STATES = 0, 1
"""Parts of a sequence's state, see `StatePool`."""

# Torch computes whole vectors of a tensor and the rest with functions that round differently. Rows
# of a multiple of this many elements are computed in whole vectors.
VECTOR_ELEMENTS = 64
UNIT_EPSILON = 1e-6  # of the squared length of keys and queries


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of one layer; each key head serves as many value heads in turn."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_size(self) -> int:
        """Values of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Values of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of one layer's state."""
        return (self.num_value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Order in which the tokens of rows of different lengths are computed.

    First tokens of all rows, then second tokens of those that have one, and so on.
    """

    rows: Tensor  # int64 [B] rows, the longest first
    tokens: Tensor  # int64 [T] tokens in their order
    counts: tuple[int, ...]  # tokens that are computed at once; those of the first `count` rows

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> TokenOrder:
        """Find the order for rows of these lengths."""
        sizes = np.array(lengths, dtype=np.int64)
        rows = np.argsort(-sizes, kind="stable")
        starts = (np.cumsum(sizes) - sizes)[rows]
        counts = tuple(int((sizes > place).sum()) for place in range(sizes.max()))
        tokens = [starts[:count] + place for place, count in enumerate(counts)]
        sent = to_device(torch.from_numpy(np.concatenate([rows, *tokens])), device)
        return cls(sent[: len(rows)], sent[len(rows) :], counts)


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Rows of one forward, for all layers with a state."""

    states: StateRows
    windows: ConvWindows | None  # None: one token per row
    order: TokenOrder | None  # None: one token per row

    @classmethod
    def of(cls, batch: ForwardBatch, conv_width: int) -> DeltaRows:
        """Find them for a convolution over `conv_width` tokens."""
        states, device = StateRows.of(batch), batch.positions.device
        if states.lengths is None:
            return cls(states, None, None)
        windows = ConvWindows.of(states.lengths, conv_width, device)
        return cls(states, windows, TokenOrder.of(states.lengths, device))


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """Inputs of the delta rule, float32, for T tokens, N key heads and M value heads of each."""

    queries: Tensor  # [T, N, 1, K, 1]
    keys: Tensor  # [T, N, 1, K, 1]
    values: Tensor  # [T, N, M, V]
    decays: Tensor  # [T, N, M, 1, 1]
    strengths: Tensor  # [T, N, M, 1]

    def ordered(self, tokens: Tensor) -> DeltaTokens:
        """Return tokens in another order."""
        return DeltaTokens(*(part.index_select(0, tokens) for part in self._parts))

    def between(self, start: int, end: int) -> DeltaTokens:
        """Return a part of the tokens."""
        return DeltaTokens(*(part[start:end] for part in self._parts))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return (self.queries, self.keys, self.values, self.decays, self.strengths)


class DeltaRule:
    """The update of all heads' states by tokens, and what the tokens read."""

    def __init__(self, shape: DeltaShape) -> None:
        self.shape = shape

    def update(
        self, tokens: DeltaTokens, states: Tensor, rows: StateRows, order: TokenOrder | None
    ) -> Tensor:
        """Return the results [T, heads, V], and update the rows' states.

        `states` are all of the layer, [states, heads, K, V]. `order` None: one token per row.
        """
        shape = self.shape
        read, written = rows.read, rows.written
        if order is not None:
            read, written = read[order.rows], written[order.rows]
        before = states.index_select(0, read)
        heads = before.view(len(before), shape.num_key_heads, -1, shape.key_dim, shape.value_dim)
        found = advance(heads, tokens) if order is None else self._one_by_one(heads, tokens, order)
        states.index_copy_(0, written, before)
        return found.reshape(-1, shape.num_value_heads, shape.value_dim)

    def _one_by_one(self, heads: Tensor, tokens: DeltaTokens, order: TokenOrder) -> Tensor:
        ordered, start = tokens.ordered(order.tokens), 0
        found = torch.empty_like(tokens.values)
        for count in order.counts:
            end = start + count
            results = advance(heads[:count], ordered.between(start, end))
            found.index_copy_(0, order.tokens[start:end], results)
            start = end
        return found


def advance(states: Tensor, tokens: DeltaTokens) -> Tensor:
    """Update states [B, N, M, K, V] in place by one token each; return the results [B, N, M, V]."""
    states.mul_(tokens.decays)
    known = sum_keys(states * tokens.keys)
    changes = (tokens.values - known).mul_(tokens.strengths)
    # Separate products and sums: a fused operation rounds once, and not in every kernel.
    states.add_(tokens.keys * changes.unsqueeze(-2))
    return sum_keys(states * tokens.queries)


def sum_keys(x: Tensor) -> Tensor:
    """Return the sums [B, N, M, V] of [B, N, M, K, V] over K; overwrites it."""
    size = x.shape[-2]
    while size > 1:
        half = size // 2
        x[..., :half, :].add_(x[..., size - half : size, :])
        size -= half
    return x[..., 0, :].clone()  # x is many times as large


def activate(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for [T, n] and an elementwise function; a row does not depend on its
    place.
    """
    num_rows, size = x.shape
    wide = x.new_zeros(num_rows, -(-size // VECTOR_ELEMENTS) * VECTOR_ELEMENTS)
    wide[:, :size] = x
    for block in row_blocks(wide, wide.shape[1]):
        block.copy_(function(block))
    return wide[:, :size]


def unit(x: Tensor, factor: float = 1.0) -> Tensor:
    """Return [T, N, K] with each head of length `factor`."""
    scale = torch.linalg.vector_norm(x, 2.0, 2, True)
    return x * scale.mul_(scale).add_(UNIT_EPSILON).rsqrt_().mul_(factor)


class GatedNorm:
    """Root mean square norm of each head, times silu of a gate."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """`weight` [V]."""
        size = weight.numel()
        self.gain = weight.float() * size**0.5
        self.epsilon = epsilon * size

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return float32 [T, heads × V] for x [T, heads, V] and gate [T, heads × V]."""
        scale = torch.linalg.vector_norm(x, 2.0, 2, True)
        scale.mul_(scale).add_(self.epsilon).rsqrt_()
        normalized = torch.mul(x, scale).mul_(self.gain)
        return normalized.flatten(1).mul_(activate(F.silu, gate.float()))


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """Decay and strength of the heads' updates."""

    linear: Linear  # hidden -> 2 × heads: strengths, time steps
    bias: Tensor  # float32 [heads], of time steps
    rates: Tensor  # float32 [heads], negative

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return decays and strengths [T, heads], float32 in [0, 1], for x [T, hidden]."""
        strengths, steps = self.linear(x).float().chunk(2, dim=1)
        logarithms = activate(F.softplus, steps + self.bias) * self.rates
        return activate(torch.exp, logarithms), activate(torch.sigmoid, strengths)


class DeltaNet:
    """The gated delta net in place of attention."""

    def __init__(
        self,
        layer: int,
        shape: DeltaShape,
        *,
        project: Linear,
        conv: ShortConv,
        gates: DeltaGates,
        norm: GatedNorm,
        output: Linear,
    ) -> None:
        """`layer`: number among the layers with states.

        `project`: hidden -> queries, keys, values, and gates of the results.
        """
        self.layer = layer
        self.shape = shape
        self.project = project
        self.conv = conv
        self.gates = gates
        self.norm = norm
        self.output = output
        self._rule = DeltaRule(shape)

    def __call__(self, x: Tensor, pool: StatePool, rows: DeltaRows) -> Tensor:
        """Return [T, hidden] for x [T, hidden], and update the rows' states of this layer."""
        inputs, gate = self.project(x).split([self.shape.conv_size, self.shape.value_size], dim=1)
        kept = pool.layer(CONV_STATES, self.layer)
        mixed = self.conv.convolve(inputs, kept, rows.states, rows.windows)
        tokens = self._tokens(x, activate(F.silu, mixed).float())
        states = pool.layer(DELTA_STATES, self.layer)
        found = self._rule.update(tokens, states, rows.states, rows.order)
        return self.output(self.norm(found, gate).to(x.dtype))

    def _tokens(self, x: Tensor, mixed: Tensor) -> DeltaTokens:
        """Divide [T, queries | keys | values]."""
        shape, num_tokens = self.shape, len(x)
        sizes = [shape.key_size, shape.key_size, shape.value_size]
        queries, keys, values = mixed.split(sizes, dim=1)
        by_key = (num_tokens, shape.num_key_heads, shape.key_dim)
        by_value = (num_tokens, shape.num_key_heads, -1)
        decays, strengths = (part.reshape(*by_value, 1) for part in self.gates(x))
        return DeltaTokens(
            unit(queries.reshape(by_key), shape.key_dim**-0.5)[:, :, None, :, None],
            unit(keys.reshape(by_key))[:, :, None, :, None],
            values.reshape(*by_value, shape.value_dim),
            decays.unsqueeze(-1),
            strengths,
        )
