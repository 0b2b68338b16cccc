"""`DepthTransformer`: a small decoder over the codes of one frame, for all rows of a step at once.

    position 0   hidden state of the language model
    position k   code k - 1 of the frame   ─ layers ─ norm ─ head k ─> logits of code k

Its keys and values live for one frame, and every row attends to its own. Products are those of the
language model: on a CPU, and with `batch_invariant`, a row's codes do not depend on the other rows.
On a GPU some tens of rows have kernels of their own (`llm.layers.split_depth`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels.registry import KernelSet
from llm.layers.decoder import DecoderLayer, LogitsHead, Rotary
from llm.layers.linear import Linear
from llm.layers.stack import create_stack
from llm.request import FrameShape


class Frames(Protocol):
    """Frames of B rows, of which some codes are known."""

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows `codes` [B]."""


class DepthTransformer:
    """Layers of a depth transformer; `heads[k]` belongs to code k + 1."""

    def __init__(
        self,
        *,
        shape: FrameShape,
        embedding: Tensor,
        projection: Linear | None,
        layers: Sequence[DecoderLayer],
        rotary: Rotary,
        heads: Sequence[LogitsHead],
        kernels: KernelSet,
    ) -> None:
        """Row `first_row(shape, k) + code` of `embedding` [N, H] is that of a code k. `projection`
        is from H to the layers' size; None: they are the same.
        """
        self.shape = shape
        self.embedding = embedding
        self.projection = projection
        self.kernels = kernels
        positions = torch.arange(shape.num_codebooks, device=embedding.device)
        self.rotations = rotary.at(positions)  # [K, 1, D/2]
        self.attention = layers[0].attention.shape
        self.layers: Sequence[Any] = layers
        self._split: Any = None
        self.num_kernel_products = 0
        if kernels:
            from llm.layers import split_depth  # imports Triton

            fused = [split_depth.FrameLayer(layer, kernels) for layer in layers]
            self.layers = fused
            self.num_kernel_products = sum(layer.num_kernel_products for layer in fused)
            if "multiply_split" in kernels:
                self._split = split_depth.SplitDepth.create(self, layers, heads, kernels)
        ends = [create_stack((), head, kernels) for head in heads]
        self.heads = [end.head for end in ends if end.head is not None]
        self.num_kernel_products += sum(end.num_kernel_products for end in ends)

    def begin(self, hidden: Tensor) -> Frames:
        """Begin frames at hidden states [B, H]."""
        if self._split is not None and self._split.takes(len(hidden)):
            split: Frames = self._split.begin(hidden)
            return split
        frames = DepthFrames(self, hidden)
        frames.feed(hidden.clone() if self.projection is None else hidden)
        return frames

    def new_cache(self, hidden: Tensor) -> Tensor:
        """Return memory for keys and values [L, 2, B, K, Hkv, D] of frames."""
        attention = self.attention
        heads = (attention.num_kv_heads, attention.head_dim)
        return hidden.new_empty(len(self.layers), 2, len(hidden), self.shape.num_codebooks, *heads)

    def table(self, code: int) -> Tensor:
        """Return the embeddings [V, H] of a code, followed by those of later ones."""
        return self.embedding[first_row(self.shape, code) :]


def first_row(shape: FrameShape, codebook: int) -> int:
    """Return the first row of a codebook in a table of all codes, one codebook after the other."""
    if codebook == 0:
        return 0
    return shape.codebook_size + (codebook - 1) * (shape.later_size or shape.codebook_size)


class DepthFrames:
    """Frames of B rows in progress: their keys and values, and the number of fed positions."""

    def __init__(self, model: DepthTransformer, hidden: Tensor) -> None:
        self._model = model
        self.cache = model.new_cache(hidden)
        self.rotations = model.rotations
        self.num_fed = 0

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows `codes` [B]."""
        model, book = self._model, self.num_fed - 1
        return model.heads[book](self.feed(F.embedding(codes, model.table(book))))

    def feed(self, inputs: Tensor) -> Tensor:
        """Feed inputs [B, H] at the next position; return the last layer's output.

        The layers overwrite the inputs, unless there is a projection.
        """
        model = self._model
        x = inputs if model.projection is None else model.projection(inputs)
        rotations = model.rotations[self.num_fed : self.num_fed + 1]
        if not model.kernels:  # one for each row: torch computes a row with those of all alike
            rotations = rotations.expand(len(x), -1, -1).contiguous()
        for layer in model.layers:
            layer(x, rotations, self)
        self.num_fed += 1
        return x

    def slots(self, layer: int) -> KVSlots | None:
        """See `KVCacheInputs`: `attend` stores."""
        return None

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [B, 2, Hkv, D] keys and values; attend with queries [B, H, D]; return [B, H × D].

        Products and sums are separate: a matrix product's order of sums may depend on B.
        """
        cache, last = self.cache[layer], self.num_fed + 1
        cache[:, :, self.num_fed] = key_value.transpose(0, 1)
        keys, values = cache[:, :, :last].transpose(2, 3).unsqueeze(3)  # [B, Hkv, 1, P, D]
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = key_value.shape[2]
        grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
        scores = (grouped * keys).sum(-1, dtype=torch.float32) * head_dim**-0.5
        weights = scores.softmax(-1).unsqueeze(-1)  # [B, Hkv, G, P, 1]
        attended = (weights * values).sum(-2).to(query.dtype)
        return attended.reshape(num_rows, num_heads * head_dim)
