"""`DepthTransformer`: a small decoder over the codes of one frame, for all rows of a step at once.

    position 0   hidden state of the language model
    position k   code k - 1 of the frame   ─ layers ─ norm ─ head k ─> logits of code k

Its keys and values live for one frame, and every row attends to its own. Products are those of the
language model: on a CPU, and with `batch_invariant`, a row's codes do not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import KVSlots
from llm.kernels.registry import KernelSet
from llm.layers.decoder import DecoderLayer, LogitsHead, Rotary
from llm.layers.linear import Linear
from llm.layers.stack import create_stack
from llm.request import FrameShape


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
        stack = create_stack(layers, None, kernels)
        self.layers: Sequence[Any] = stack.layers
        ends = [create_stack((), head, kernels) for head in heads]
        self.heads = [end.head for end in ends if end.head is not None]
        self.num_kernel_products = sum(part.num_kernel_products for part in (stack, *ends))
        self.rotary = rotary
        self.attention = layers[0].attention.shape
        self.kernels = kernels

    def begin(self, hidden: Tensor) -> DepthFrames:
        """Begin frames at hidden states [B, H]."""
        frames = DepthFrames(self, hidden)
        frames.feed(hidden.clone() if self.projection is None else hidden)
        return frames


def first_row(shape: FrameShape, codebook: int) -> int:
    """Return the first row of a codebook in a table of all codes, one codebook after the other."""
    if codebook == 0:
        return 0
    return shape.codebook_size + (codebook - 1) * (shape.later_size or shape.codebook_size)


class DepthFrames:
    """Frames of B rows in progress: their keys and values, and the number of fed positions."""

    def __init__(self, model: DepthTransformer, hidden: Tensor) -> None:
        self._model = model
        attention, positions = model.attention, model.shape.num_codebooks
        num_rows, num_layers = len(hidden), len(model.layers)
        shape = (num_layers, 2, num_rows, positions, attention.num_kv_heads, attention.head_dim)
        self._cache = hidden.new_empty(shape)
        numbers = torch.arange(positions, device=hidden.device).repeat_interleave(num_rows)
        self._rotations = model.rotary.at(numbers).split(num_rows)
        self._num_fed = 0

    def next_logits(self, codes: Tensor) -> Tensor:
        """Return float32 [B, V] logits of the code that follows `codes` [B].

        V is the size of the first codebook; of a smaller one the logits end with -inf.
        """
        model, book = self._model, self._num_fed - 1
        shape = model.shape
        x = self.feed(F.embedding(codes, model.embedding[first_row(shape, book) :]))
        logits = model.heads[book](x)
        missing = shape.codebook_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-math.inf) if missing else logits

    def feed(self, inputs: Tensor) -> Tensor:
        """Feed inputs [B, H] at the next position; return the last layer's output.

        The layers overwrite the inputs, unless there is a projection.
        """
        model = self._model
        x = inputs if model.projection is None else model.projection(inputs)
        for layer in model.layers:
            layer(x, self._rotations[self._num_fed], self)
        self._num_fed += 1
        return x

    def slots(self, layer: int) -> KVSlots | None:
        """See `KVCacheInputs`: `attend` stores."""
        return None

    def attend(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Store [B, 2, Hkv, D] keys and values; attend with queries [B, H, D]; return [B, H × D].

        Products and sums are separate: a matrix product's order of sums may depend on B.
        """
        cache, last, kernels = self._cache[layer], self._num_fed + 1, self._model.kernels
        if "attend_frame" in kernels:
            from llm.kernels.frames import attend_frame  # imports Triton

            level = kernels.launch_level
            return attend_frame(query, key_value, cache, self._num_fed, level=level)
        cache[:, :, self._num_fed] = key_value.transpose(0, 1)
        keys, values = cache[:, :, :last].transpose(2, 3).unsqueeze(3)  # [B, Hkv, 1, P, D]
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = key_value.shape[2]
        grouped = query.view(num_rows, num_kv_heads, num_heads // num_kv_heads, 1, head_dim)
        scores = (grouped * keys).sum(-1, dtype=torch.float32) * head_dim**-0.5
        weights = scores.softmax(-1).unsqueeze(-1)  # [B, Hkv, G, P, 1]
        attended = (weights * values).sum(-2).to(query.dtype)
        return attended.reshape(num_rows, num_heads * head_dim)
