"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in place of the MLPs of all or some layers.

A sliding window, if there is one, is that of all layers.
"""

from __future__ import annotations

from dataclasses import replace

from llm.config import PipelineConfig
from llm.errors import ConfigError
from llm.layers.experts import ExpertsShape
from llm.models.base import product_bytes
from llm.models.encoding import choose_encoding
from llm.models.experts import SparseLayers, SparseLoader
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama_config import LlamaConfig
from llm.models.qwen3 import Qwen3Model
from llm.models.weights import WeightReader

DEFAULT = ExpertsShape(128, 8, inner_size=768, shared_size=0, normalizes=False)


class Qwen3MoeModel(Qwen3Model):
    """Implements `Qwen3MoeForCausalLM`."""

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        read, text = super().read_config(config), config.text_config
        windows: tuple[int | None, ...] = ()
        if text.get("use_sliding_window", False) and text.get("sliding_window") is not None:
            windows = (text.size("sliding_window"),) * read.shape.num_layers
        sparse = SparseLayers.read(text, read.shape.num_layers, DEFAULT)
        num_mlp_weights = None if sparse is None else sparse.num_mlp_weights(read)
        return replace(read, windows=windows, num_mlp_weights=num_mlp_weights)

    @classmethod
    def sparse_layers(cls, config: HuggingFaceConfig) -> SparseLayers | None:
        """Return the layers with experts; None without any. Raises `CheckpointError`."""
        num_layers = cls.shape(config).num_layers
        return SparseLayers.read(config.text_config, num_layers, DEFAULT)

    @classmethod
    def divided_sizes(cls, huggingface_config: HuggingFaceConfig, ep_size: int) -> dict[str, int]:
        """See `LlamaModel`: the MLPs of sparse layers are split by experts or by columns."""
        sizes = super().divided_sizes(huggingface_config, ep_size)
        sparse = cls.sparse_layers(huggingface_config)
        if sparse is None:
            if ep_size > 1:
                raise ConfigError(f"ep_size={ep_size}: no layer of this model has experts")
            return sizes
        if len(sparse.numbers) == cls.shape(huggingface_config).num_layers:
            del sizes["intermediate_size"]
        if ep_size > 1:
            return sizes | {"num_experts": sparse.shape.num_experts}
        return sizes | {"moe_intermediate_size": sparse.shape.inner_size}

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """See `PipelineModel`. Each rank has all routers, which are never quantised."""
        size = super().estimate_weights_size(pipeline_config)
        model = pipeline_config.model
        huggingface_config = HuggingFaceConfig.read(model.model_path)
        sparse = cls.sparse_layers(huggingface_config)
        if sparse is None:
            return size
        encoding = choose_encoding(model, huggingface_config)
        hidden = cls.shape(huggingface_config).hidden_size
        routers = len(sparse.numbers) * sparse.shape.num_experts * hidden
        counted = routers * product_bytes(encoding, pipeline_config) // len(model.device_specs)
        return size + routers * encoding.dtype.itemsize - counted

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """See `PipelineModel`."""
        own = super().estimate_token_memory(pipeline_config, huggingface_config)
        sparse = cls.sparse_layers(huggingface_config)
        if sparse is None:
            return own
        model, hidden = pipeline_config.model, cls.shape(huggingface_config).hidden_size
        width = choose_encoding(model, huggingface_config).dtype.itemsize
        return max(own, sparse.shape.token_bytes(hidden, width, is_grouped=not model.on_cpu))

    def _loader(self, reader: WeightReader) -> SparseLoader:
        sparse = self.sparse_layers(self.huggingface_config)
        is_spread = self.pipeline_config.ep_size > 1
        common = (self.config, self.names, self._factory, self._rope_type, self.group)
        return SparseLoader(reader, *common, sparse, is_spread)
