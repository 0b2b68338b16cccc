"""Architectures by the name in config.json, imported on demand."""

from __future__ import annotations

from importlib import import_module

from llm.batch import ScheduledRow
from llm.errors import CheckpointError
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig

_ARCHITECTURES = {
    "LlamaForCausalLM": ("llm.models.llama", "LlamaModel"),
    "MistralForCausalLM": ("llm.models.mistral", "MistralModel"),
    "Qwen2ForCausalLM": ("llm.models.qwen2", "Qwen2Model"),
    "Qwen3ForCausalLM": ("llm.models.qwen3", "Qwen3Model"),
}


def supported_architectures() -> tuple[str, ...]:
    """Names that `model_class` knows."""
    return tuple(_ARCHITECTURES)


def model_class(config: HuggingFaceConfig) -> type[PipelineModel[ScheduledRow]]:
    """The class for a checkpoint. Raises `CheckpointError` naming the supported ones."""
    name = config.architecture
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{config.path}: architecture '{name}' is not supported; "
            f"these are: {', '.join(_ARCHITECTURES)}"
        )
    module, attribute = _ARCHITECTURES[name]
    found: type[PipelineModel[ScheduledRow]] = getattr(import_module(module), attribute)
    return found
