"""Mistral 7B and its successors (Jiang et al. 2023): Llama, some with a sliding window."""

from __future__ import annotations

from dataclasses import replace

from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig


class MistralModel(LlamaModel):
    """Implements `MistralForCausalLM`. Version 0.1 has a window in every layer, later ones have
    none.
    """

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        read = LlamaConfig.read(config)
        text = config.text_config
        if text.get("sliding_window") is None:
            return read
        return replace(read, windows=(text.size("sliding_window"),) * read.shape.num_layers)
