"""A depth transformer on a CUDA device, with built-in kernels.

    rows           products
    1, 2           `FrameLayer`: those of `llm.layers.fused` for few rows
    3 to 64        `SplitDepth`: `llm.kernels.split_products`
    more           `FrameLayer`: BLAS

    codes ─ add_normalised ┬ multiply_split ─ attend_frame ─ multiply_split ─ add_normalised ┐
                  layers × └ add_normalised ─ multiply_split ─ multiply_gated ───────────────┘
                           └ multiply_split ─> logits

The matrices of a layer are read from memory once for each code, while each kernel takes a few
microseconds: the kernels are few, and start before the one before them ends (launch level 2). The
hidden state and the first code are both known before the first logits are: they pass the layers
together, as twice as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.kernels.blocks import Tiles
from llm.kernels.cuda import most_shared_bytes
from llm.kernels.frames import attend_frame
from llm.kernels.registry import KernelSet
from llm.kernels.split_products import add_normalised, multiply_gated, multiply_split
from llm.kernels.tuning import MAX_ROWS, MAX_SPLIT_ROWS, SPLIT_BYTES, split_tiles
from llm.layers.decoder import (
    AttentionShape,
    DecoderLayer,
    GatedMLP,
    HeadNorm,
    LogitsHead,
    RMSNorm,
)
from llm.layers.fused import FusedLayer, plain_matrix
from llm.layers.linear import Linear


def narrow_matrix(linear: Linear) -> Tensor | None:
    """Return the matrix [N, K] of a layer that only multiplies with it, in numbers of 2 bytes; None
    for other layers, and on a GPU with less shared memory than a product needs.
    """
    matrix = plain_matrix(linear)
    if matrix is None or matrix.dtype.itemsize != 2:
        return None
    has_room = not matrix.is_cuda or most_shared_bytes(matrix.device) >= SPLIT_BYTES
    return matrix if has_room else None


def tiles_of(weight: Tensor, num_rows: int, *, parts: int = 1, is_whole: bool = False) -> Tiles:
    """Return the tiles of a product of rows with a matrix [parts × N, K]."""
    num_out, num_in = weight.shape
    return split_tiles(num_out // parts, num_in, num_rows, parts=parts, is_whole=is_whole)


class FramesOfLayers(Protocol):
    """The part of `llm.layers.depth.DepthFrames` that a layer reads and writes."""

    cache: Tensor  # [L, 2, B, P, Hkv, D]
    rotations: Tensor  # complex64 [P, 1, D/2]
    num_fed: int


class FrameLayer(FusedLayer):
    """A layer whose keys and values are those of frames: `attend_frame` normalises and rotates."""

    def _attend(self, x: Tensor, rotations: Tensor, cache: Any) -> Tensor:
        """Return [B, H × D] for the next position of `FramesOfLayers`."""
        frames: FramesOfLayers = cache
        norm = self._head_norm
        return attend_frame(
            self._qkv(x)[None],
            frames.rotations,
            frames.cache[self._index],
            frames.num_fed,
            num_heads=self._shape.num_heads,
            gain=None if norm is None else norm.gain,
            epsilon=0.0 if norm is None else norm.epsilon,
            level=self._level,
        )


class Depth(Protocol):
    """The part of `llm.layers.depth.DepthTransformer` that `SplitDepth` reads."""

    projection: Linear | None
    rotations: Tensor
    attention: AttentionShape

    def new_cache(self, hidden: Tensor) -> Tensor: ...

    def table(self, code: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SplitLayer:
    """Matrices [N, K] and norms of a layer."""

    attention_norm: RMSNorm
    qkv: Tensor
    head_norm: HeadNorm | None
    output: Tensor
    mlp_norm: RMSNorm
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer) -> SplitLayer | None:
        """Return those of a layer; None if it has another matrix than `narrow_matrix`."""
        weights, mlp = layer.attention.weights, layer.mlp
        if not isinstance(mlp, GatedMLP):
            return None
        linears = (weights.qkv, weights.output, mlp.gate_up, mlp.down)
        plain = [matrix for linear in linears if (matrix := narrow_matrix(linear)) is not None]
        if len(plain) < len(linears):
            return None
        qkv, output, gate_up, down = plain
        norms = layer.attention_norm, layer.mlp_norm
        return cls(norms[0], qkv, weights.norm, output, norms[1], gate_up, down)


@dataclass(frozen=True, slots=True)
class SplitDepth:
    """The layers and heads of a depth transformer, for 3 to `MAX_SPLIT_ROWS` rows."""

    model: Depth
    layers: Sequence[SplitLayer]
    heads: Sequence[tuple[RMSNorm, Tensor]]
    level: int

    @classmethod
    def create(
        cls,
        model: Depth,
        layers: Sequence[DecoderLayer],
        heads: Sequence[LogitsHead],
        kernels: KernelSet,
    ) -> SplitDepth | None:
        """Return None if there is another matrix than `narrow_matrix`."""
        own = [found for layer in layers if (found := SplitLayer.of(layer)) is not None]
        matrices = [(head.norm, narrow_matrix(head.linear)) for head in heads]
        ends = [(norm, matrix) for norm, matrix in matrices if matrix is not None]
        if len(own) < len(layers) or len(ends) < len(heads):
            return None
        return cls(model, own, ends, kernels.launch_level)

    def takes(self, num_rows: int) -> bool:
        """Return whether it computes so many rows."""
        return MAX_ROWS < num_rows <= MAX_SPLIT_ROWS

    def begin(self, hidden: Tensor) -> SplitFrames:
        """Begin frames at hidden states [B, H]."""
        return SplitFrames(self, hidden)


class SplitFrames:
    """Frames of B rows in progress."""

    def __init__(self, own: SplitDepth, hidden: Tensor) -> None:
        self._own = own
        self._hidden = hidden
        self._cache = own.model.new_cache(hidden)
        self._num_fed = 0

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows `codes` [B]."""
        own = self._own
        source, named = self._inputs(codes)
        self._num_fed = max(self._num_fed + 1, 2)
        norm, head = own.heads[self._num_fed - 2]
        normed = self._feed(source, named, norm)
        logits = normed.new_empty(len(codes), len(head), dtype=torch.float32)
        tiles = tiles_of(head, len(codes), is_whole=True)
        return multiply_split(normed, head, tiles, out=logits, level=own.level)

    def _inputs(self, codes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of the next position, or [2 × B, H] of the first two; or a table, and
        the codes that name its rows.
        """
        model = self._own.model
        table = model.table(max(self._num_fed - 1, 0))
        if self._num_fed > 0 and model.projection is None:
            return table, codes
        inputs = F.embedding(codes, table)
        if self._num_fed == 0:
            inputs = torch.cat([self._hidden, inputs])
        return inputs if model.projection is None else model.projection(inputs), None

    def _feed(self, source: Tensor, codes: Tensor | None, last_norm: RMSNorm) -> Tensor:
        """Feed what `_inputs` returns. Return the normalised output of the last layer."""
        layers, num_rows = self._own.layers, len(self._hidden)
        x = source if codes is None else source.new_empty(num_rows, source.shape[1])
        next_norms = [*(layer.attention_norm for layer in layers[1:]), last_norm]
        normed = self._added(x, source, None, layers[0].attention_norm, codes)
        for number, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = self._attended(number, layer, normed)
            if number == len(layers) - 1:  # of the first position only keys and values are read
                attended, x = attended[-num_rows:], x[-num_rows:]
            normed = self._added(x, x, self._product(attended, layer.output), layer.mlp_norm)
            gated = self._gated(normed, layer.gate_up)
            normed = self._added(x, x, self._product(gated, layer.down), next_norm)
        return normed

    def _added(
        self,
        x: Tensor,
        source: Tensor,
        sums: Tensor | None,
        norm: RMSNorm,
        codes: Tensor | None = None,
    ) -> Tensor:
        """Set x to the source plus sums; return its norm."""
        level = self._own.level
        return add_normalised(source, sums, norm.gain, norm.epsilon, x, codes=codes, level=level)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return parts [S, T, N] of x [T, K] × weight [N, K]ᵀ."""
        return multiply_split(x, weight, tiles_of(weight, len(x)), level=self._own.level)

    def _gated(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return silu(x gateᵀ) × (x upᵀ)."""
        tiles = tiles_of(weight, len(x), parts=2)
        return multiply_gated(x, weight, tiles, level=self._own.level)

    def _attended(self, number: int, layer: SplitLayer, x: Tensor) -> Tensor:
        """Return what a layer's queries attend to, [T, H × D]."""
        own, norm = self._own, layer.head_norm
        return attend_frame(
            self._product(x, layer.qkv),
            own.model.rotations,
            self._cache[number],
            self._num_fed - len(x) // len(self._hidden),
            num_heads=own.model.attention.num_heads,
            gain=None if norm is None else norm.gain,
            epsilon=0.0 if norm is None else norm.epsilon,
            level=own.level,
        )
