"""Qwen3 (Yang et al. 2025): Llama with normalised queries and keys, and optional biases."""

from __future__ import annotations

from dataclasses import replace

from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig
from llm.models.qwen2 import qwen_windows


class Qwen3Model(LlamaModel):
    """Implements `Qwen3ForCausalLM`."""

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        read = LlamaConfig.read(config)
        has_bias = bool(config.text_config.get("attention_bias", False))
        return replace(
            read,
            has_head_norm=True,
            has_qkv_bias=has_bias,
            has_output_bias=has_bias,
            windows=qwen_windows(config.text_config, read.shape.num_layers),
        )
