"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from llm.errors import CheckpointError
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LlamaModel
from llm.models.llama_config import LlamaConfig

SLIDING = "sliding_attention"


class Qwen2Model(LlamaModel):
    """Implements `Qwen2ForCausalLM`."""

    @classmethod
    def read_config(cls, config: HuggingFaceConfig) -> LlamaConfig:
        """See `LlamaModel`."""
        read = LlamaConfig.read(config)
        windows = qwen_windows(config.text_config, read.shape.num_layers)
        return replace(read, has_qkv_bias=True, windows=windows)


def qwen_windows(config: HuggingFaceConfig, num_layers: int) -> tuple[int | None, ...]:
    """Return windows by layer.

    They are off unless `use_sliding_window`, then for the layers that `layer_types` names, or
    (older files) those from `max_window_layers` on.
    """
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return ()
    window = config.size("sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.number("max_window_layers", 28)
        kinds = [SLIDING if layer >= first else "" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.path}: layer_types names {len(kinds)} layers, there are {num_layers}"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)
