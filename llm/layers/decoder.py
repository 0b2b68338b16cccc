"""The layers of a decoder-only model, computed by torch, from the embedding to the logits.

    ids ─ Embedding ─ x ─ DecoderLayer × L ─ x ─ LogitsHead ─ logits

`create_stack` replaces `DecoderLayer` and `LogitsHead` by other implementations of the same
computation: compiled, or with built-in kernels.

Checkpoints pair dimension i of a head with i + D/2. Rows of the query and key weights are reordered
once (`interleaved_rows`) so that pairs are neighbours and a rotation is one complex product;
queries and keys are permuted alike, which keeps their products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import KVCacheInputs, LayerCache
from llm.layers.linear import Linear
from llm.layers.rotary import RotaryConfig
from llm.layers.weight import LinearWeight
from llm.parallel.group import Group
from llm.request import IdRange

# Below this many elements torch runs an elementwise kernel in one piece. Above, it may split it
# over threads anywhere, and the rest of a split is computed by a scalar exponential that rounds
# differently: a token's result would depend on its position in the batch.
UNSPLIT_ELEMENTS = 32768


class Layer(Protocol):
    """One layer of a model."""

    def __call__(self, x: Tensor, rotations: Tensor, cache: KVCacheInputs) -> None:
        """Update x [T, hidden] in place."""


class MLP(Protocol):
    """The second part of a layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""


class Head(Protocol):
    """The head of a model, applied to the tokens whose logits are computed."""

    def __call__(
        self, hidden: Tensor, out: Tensor | None = None, needed: Tensor | None = None
    ) -> Tensor:
        """Return float32 logits [R, V] of [R, hidden] of the last layer, in `out` if given.

        Only logits of ids in the range `needed` int32 [2] on the device may be computed, see
        `limit`: the others in `out` may then be those of an earlier call.
        """

    def limit(self, common: IdRange) -> bool:
        """Prepare for calls with `needed`, which is mostly within `common`. Returns whether they
        take less time; if not, `needed` has no effect.
        """


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Computes x + attention(norm x), then x + mlp(norm x)."""

    attention_norm: RMSNorm
    attention: SelfAttention
    mlp_norm: RMSNorm
    mlp: MLP

    def __call__(self, x: Tensor, rotations: Tensor, cache: LayerCache) -> None:
        """See `Layer`."""
        x.add_(self.attention(self.attention_norm(x), rotations, cache))
        x.add_(self.mlp(self.mlp_norm(x)))

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values [T, H + 2 × Hkv, D]: all before the attention."""
        return self.attention.project(self.attention_norm(x))

    def finish(self, x: Tensor, attended: Tensor) -> None:
        """Add to x the output of attended [T, H × D], then the MLP: all after the attention."""
        x.add_(self.attention.output(attended))
        x.add_(self.mlp(self.mlp_norm(x)))


@dataclass(frozen=True, slots=True)
class LogitsHead:
    """Computes head(norm x)."""

    norm: RMSNorm
    linear: Linear

    def __call__(
        self, hidden: Tensor, out: Tensor | None = None, needed: Tensor | None = None
    ) -> Tensor:
        """See `Head`."""
        logits = self.linear(self.norm(hidden))
        return logits.float() if out is None else out.copy_(logits)

    def limit(self, common: IdRange) -> bool:
        """See `Head`."""
        return False


class Embedding:
    """Maps [T] ids to rows [T, hidden] of a table, which may stay int8 or, on a CPU, in groups."""

    def __init__(
        self, weight: LinearWeight, *, dtype: torch.dtype, device: torch.device, int8: bool
    ) -> None:
        self.dtype = dtype
        self._scales: Tensor | None = None
        self._groups = weight.groups if device.type == "cpu" else None
        if self._groups is not None:
            self.table = self._groups.values
        elif int8:
            self.table, scales = weight.to_int8()
            self._scales = scales[:, None].to(dtype)
        else:
            self.table = weight.to_float(dtype).to(device)
        self.num_embeddings, self.hidden_size = weight.shape

    def __call__(self, ids: Tensor) -> Tensor:
        """Return rows of the table."""
        if self._groups is not None:
            return self._groups.rows(ids).expand().to(self.dtype)
        if self._scales is None:
            return F.embedding(ids, self.table)
        return F.embedding(ids, self.table) * F.embedding(ids, self._scales)


class RMSNorm:
    """Root mean square norm (Zhang & Sennrich 2019), computed in float32.

    Maps [T, hidden] to [T, hidden]: x / √(mean(x²) + ε) × w. The input is not changed.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        # x / √(Σx²/K + ε) × w = x / √(Σx² + Kε) × √K w
        size = weight.numel()
        self.gain = (weight.float() * size**0.5).to(weight.dtype)
        self.epsilon = epsilon * size

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise each row: x / √(Σx² + `epsilon`) × `gain`."""
        # Small calls on [T, 1] are cheaper than one more pass over [T, hidden].
        scale = torch.linalg.vector_norm(x, 2.0, 1, True, dtype=torch.float32)
        scale.mul_(scale).add_(self.epsilon).rsqrt_()
        normalized = torch.mul(x, scale).mul_(self.gain)
        return normalized if x.dtype is torch.float32 else normalized.to(x.dtype)


class HeadNorm:
    """`RMSNorm` of each head's D values, in place. `weight` is [H, D]."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[1]
        self.gain = weight.float() * size**0.5
        self.epsilon = epsilon * size

    def __call__(self, x: Tensor) -> None:
        """Normalise [T, H, D]."""
        scale = torch.linalg.vector_norm(x, 2.0, 2, True, dtype=torch.float32)
        scale.mul_(scale).add_(self.epsilon).rsqrt_()
        x.copy_(torch.mul(x, scale).mul_(self.gain))


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
    """Grouped-query attention, with one product for queries, keys and values."""

    def __init__(
        self, layer: int, shape: AttentionShape, weights: AttentionWeights, group: Group
    ) -> None:
        self.layer = layer
        self.shape = shape
        self.weights = weights
        self.group = group

    def __call__(self, x: Tensor, rotations: Tensor, cache: LayerCache) -> Tensor:
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

    def attend(self, projected: Tensor, rotations: Tensor, cache: LayerCache) -> Tensor:
        """Rotate and store the result of `project`, and attend: [T, H × D]."""
        num_tokens, _, head_dim = projected.shape
        num_heads, num_kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        rotate_(projected[:, : num_heads + num_kv_heads], rotations)
        key_value = projected[:, num_heads:].view(num_tokens, 2, num_kv_heads, head_dim)
        return cache.attend(self.layer, projected[:, :num_heads], key_value)

    def output(self, attended: Tensor) -> Tensor:
        """Return [T, hidden] for attended [T, H × D]."""
        partial = self.weights.output(attended)
        return partial if self.group.size == 1 else self.group.all_reduce(partial)


class GatedMLP:
    """The gated MLP of Llama (Shazeer 2020): down(silu(gate x) × up x).

    Gate and up are one product.
    """

    def __init__(self, gate_up: Linear, down: Linear, group: Group) -> None:
        self.gate_up = gate_up
        self.down = down
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, hidden] for x [T, hidden]."""
        partial = self.down(silu_and_multiply(self.gate_up(x)))
        return partial if self.group.size == 1 else self.group.all_reduce(partial)


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """Return silu(gate) × up [T, I] for [T, 2 × I] gate and up; overwrites the gate."""
    gate, up = gate_up.chunk(2, dim=1)
    for block in row_blocks(gate, gate.shape[1]):
        F.silu(block, inplace=True)
    return gate * up


class Rotary:
    """Rotations of every position: complex64 [positions, 1, D/2]."""

    def __init__(self, config: RotaryConfig, num_positions: int, device: torch.device) -> None:
        self._rotations = config.rotations(num_positions).unsqueeze(1).to(device)
        self._sections = config.sections

    def at(self, positions: Tensor) -> Tensor:
        """Return rotations [T, 1, D/2] of positions [T], or of [3, T] by section.

        Raises `ValueError` for positions by section of a model that has no sections, or others.
        """
        if positions.dim() == 1:
            return self._rotations[positions]
        if self._sections is None:
            raise ValueError("the model's rotation has no sections: a token has one position")
        table = self._rotations.split(self._sections, dim=-1)
        return torch.cat([part[own] for part, own in zip(table, positions, strict=True)], dim=-1)


def rotate_(x: Tensor, rotations: Tensor) -> None:
    """Rotate [T, H, D] queries or keys in place; pairs are neighbours."""
    num_tokens, num_heads, head_dim = x.shape
    wide = x.float()
    pairs = torch.view_as_complex(wide.view(num_tokens, num_heads, head_dim // 2, 2))
    row_size = num_heads * head_dim // 2
    if num_tokens * row_size <= UNSPLIT_ELEMENTS:
        pairs.mul_(rotations)
    else:
        blocks = zip(row_blocks(pairs, row_size), row_blocks(rotations, row_size), strict=True)
        for block, rotation in blocks:
            block.mul_(rotation)
    if wide is not x:
        x.copy_(wide)


def interleaved_rows(num_heads: int, head_dim: int, rotated_dim: int | None = None) -> Tensor:
    """Return the order of weight rows [H × D] in which the halves of each head alternate.

    With `rotated_dim` the halves are those of a head's first dimensions; the others follow.
    """
    size = head_dim if rotated_dim is None else rotated_dim
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    halves = rows[:, :size].view(num_heads, 2, size // 2).transpose(1, 2).flatten(1)
    return torch.cat([halves, rows[:, size:]], dim=1).reshape(-1)


def row_blocks(x: Tensor, row_size: int) -> tuple[Tensor, ...]:
    """Return views of whole rows, each small enough to be computed in one piece.

    One view of everything on a GPU, and while torch.compile traces, which would compile the caller
    again for each number of blocks.
    """
    if x.is_cuda or torch.compiler.is_compiling() or x.shape[0] * row_size <= UNSPLIT_ELEMENTS:
        return (x,)
    return x.split(max(1, UNSPLIT_ELEMENTS // row_size))
