"""`FrameModel`: base of language models of frames, over a Llama relative.

ids [T, K] ─ embedding ─ layers ─ head ─> logits of code 0
                                └ normalised state ─ frame decoder ─> logits of code 1 …

The frame decoder is a depth transformer (`DepthModel`), or a head for each code.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from llm.batch import NO_CODE, ForwardBatch, ModelInputs, ReturnHiddenStates
from llm.config import PipelineConfig
from llm.errors import CheckpointError
from llm.kernels.tuning import SPLIT_BLOCK, SPLIT_PROGRAMS
from llm.layers.depth import DepthTransformer
from llm.layers.stack import Stack
from llm.memory.transfer import to_device
from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.request import FrameShape
from llm.sampling.device.sampler import sampler_bytes

MAX_CODEBOOKS = 256  # a larger number means a damaged file


class FrameModel(LlamaModel):
    """A Llama relative whose positions are frames or text ids."""

    can_shard: ClassVar[bool] = False
    _frame_embedding: Callable[[Tensor], Tensor]

    @classmethod
    @abstractmethod
    def read_frames(cls, config: HuggingFaceConfig) -> FrameShape:
        """Return the sizes of frames. Raises `CheckpointError` naming a key that is invalid."""

    @classmethod
    @abstractmethod
    def frame_bytes(cls, pipeline_config: PipelineConfig, config: HuggingFaceConfig) -> int:
        """Return the memory of one frame in progress."""

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `LlamaModel`; also the frames in progress, and a second sampler."""
        own = super().estimate_activation_memory(pipeline_config, huggingface_config)
        rows = pipeline_config.max_batch_size or pipeline_config.max_batch_input_tokens
        frames = rows * cls.frame_bytes(pipeline_config, huggingface_config)
        size = cls.read_frames(huggingface_config).codebook_size
        return own + frames + sampler_bytes(size, rows, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """See `LlamaModel`: sums of the embeddings of ids [T, `FrameShape.num_ids`]. Raises
        `ValueError` for [T].
        """
        if ids.dim() != 2:
            raise ValueError("a model of frames takes rows of ids, see `llm.batch.frame_rows`")
        return self._frame_embedding(ids)

    def layer_inputs(self, batch: ForwardBatch) -> Tensor:
        """See `LlamaModel`: a vector is added to what its position has besides."""
        x = super().layer_inputs(batch)
        if batch.vectors is not None:
            x[batch.input_ids[:, 0] == NO_CODE] += batch.vectors.to(x.dtype)
        return x

    def _returned_states(self, hidden: Tensor, model_inputs: ModelInputs) -> Tensor | None:
        """Return the normalised states [S, hidden] of the sampled tokens."""
        if self.return_hidden_states is not ReturnHiddenStates.NONE:
            return super()._returned_states(hidden, model_inputs)
        ends = model_inputs.forward_batch.row_offsets[1:]
        last = torch.tensor([ends[row] - 1 for row in model_inputs.sampling_rows], dtype=torch.long)
        return self.final_norm(hidden[to_device(last, hidden.device)])


class DepthModel(FrameModel):
    """A model of frames with a depth transformer."""

    frame_decoder: DepthTransformer

    @classmethod
    @abstractmethod
    def read_depth(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Return the configuration of the depth transformer's layers."""

    @classmethod
    def frame_bytes(cls, pipeline_config: PipelineConfig, config: HuggingFaceConfig) -> int:
        """See `FrameModel`: keys and values; and products of the attention, or two positions in a
        layer of `llm.layers.split_depth`.
        """
        own = cls.read_depth(config)
        depth, inner, hidden = own.shape, own.intermediate_size, own.shape.hidden_size
        width = choose_encoding(pipeline_config.model, config).dtype.itemsize
        positions = cls.read_frames(config).num_codebooks * depth.head_dim
        cached = 2 * depth.num_layers * depth.num_kv_heads * positions * width
        queries, keys = depth.num_heads * depth.head_dim, depth.num_kv_heads * depth.head_dim
        sums = 4 * max(queries + 2 * keys, hidden, SPLIT_PROGRAMS * SPLIT_BLOCK)
        pair = 2 * ((2 * hidden + queries + max(hidden, queries) + inner) * width + sums)
        return cached + max(2 * depth.num_heads * positions * 4, pair)

    def _use(self, stack: Stack) -> None:
        """See `LlamaModel`; the products of the depth transformer count, too."""
        own = stack.num_kernel_products + self.frame_decoder.num_kernel_products
        super()._use(replace(stack, num_kernel_products=own))


class FrameEmbedding:
    """Maps [T, K] ids to [T, hidden]: sums of the embeddings of K codes, or a text embedding."""

    def __init__(self, text: Tensor, audio: Tensor, shape: FrameShape) -> None:
        """`text` [ids, hidden]; `audio` [K × V, hidden]."""
        nothing = text.new_zeros(1, text.shape[1])
        self._table = torch.cat([text, audio, nothing])
        self._nothing = len(self._table) - 1  # the row for places without a code
        self._offsets = len(text) + shape.codebook_size * torch.arange(
            shape.num_codebooks, device=text.device
        )
        self.audio = self._table[len(text) : self._nothing]

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the sums."""
        rows = torch.where(ids == NO_CODE, self._nothing, ids + self._offsets)
        rows[:, 0] = torch.where(ids[:, 1] == NO_CODE, ids[:, 0], rows[:, 0])
        return F.embedding_bag(rows, self._table, mode="sum")


def codebook_count(config: HuggingFaceConfig) -> int:
    """Return `num_codebooks`. Raises `CheckpointError` for one that no model has."""
    count = config.size("num_codebooks")
    if not 2 <= count <= MAX_CODEBOOKS:
        raise CheckpointError(
            f"{config.path}: num_codebooks={count} must be in [2, {MAX_CODEBOOKS}]"
        )
    return count


def nested_config(config: HuggingFaceConfig, key: str) -> HuggingFaceConfig:
    """Return a part of a config.json. Raises `CheckpointError` if it is missing or no object."""
    nested = config.require(key)
    if not isinstance(nested, dict):
        raise CheckpointError(f"{config.path}: {key} must be an object")
    return HuggingFaceConfig(config.path, nested)
