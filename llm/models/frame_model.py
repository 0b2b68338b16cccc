"""`FrameModel`: base of language models of frames with a depth transformer, over a Llama relative.

ids [T, K] ─ embedding ─ layers ─ head ─> logits of code 0
                                └ normalised state ─ depth transformer ─> logits of code 1 …
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from llm.batch import NO_CODE, ForwardBatch, ModelInputs, ReturnHiddenStates
from llm.config import PipelineConfig
from llm.errors import CheckpointError
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
    def read_depth(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """Return the configuration of the depth transformer's layers."""

    @classmethod
    @abstractmethod
    def read_frames(cls, config: HuggingFaceConfig) -> FrameShape:
        """Return the sizes of frames. Raises `CheckpointError` naming a key that is invalid."""

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `LlamaModel`; also the frames in progress, and a second sampler."""
        own = super().estimate_activation_memory(pipeline_config, huggingface_config)
        depth = cls.read_depth(huggingface_config).shape
        frames = cls.read_frames(huggingface_config)
        width = choose_encoding(pipeline_config.model, huggingface_config).dtype.itemsize
        rows = pipeline_config.max_batch_size or pipeline_config.max_batch_input_tokens
        positions = frames.num_codebooks * depth.head_dim
        cached = 2 * depth.num_layers * depth.num_kv_heads * positions * width
        products = 2 * depth.num_heads * positions * 4
        return own + rows * (cached + products) + sampler_bytes(frames.codebook_size, rows, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """See `LlamaModel`: sums of the embeddings of [T, K] ids. Raises `ValueError` for [T]."""
        if ids.dim() != 2:
            raise ValueError("a model of frames takes ids [T, K], see `llm.batch.frame_rows`")
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


def nested_config(config: HuggingFaceConfig, key: str) -> HuggingFaceConfig:
    """Return a part of a config.json. Raises `CheckpointError` if it is missing or no object."""
    nested = config.require(key)
    if not isinstance(nested, dict):
        raise CheckpointError(f"{config.path}: {key} must be an object")
    return HuggingFaceConfig(config.path, nested)
