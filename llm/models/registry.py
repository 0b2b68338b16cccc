"""The class of a checkpoint's architecture, imported on demand."""

from __future__ import annotations

from importlib import import_module

from llm.batch import ScheduledRow
from llm.config.architectures import find_architecture
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig


def model_class(config: HuggingFaceConfig) -> type[PipelineModel[ScheduledRow]]:
    """The class for a checkpoint. Raises `CheckpointError` naming the supported ones."""
    module, _, class_name = find_architecture(config.architecture, config.path).model.partition(":")
    found: type[PipelineModel[ScheduledRow]] = getattr(import_module(module), class_name)
    return found
