"""The class of a checkpoint's architecture, imported on demand."""

from __future__ import annotations

from importlib import import_module

from llm.batch import ScheduledRow
from llm.config.architectures import find_architecture
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig


def model_class(
    config: HuggingFaceConfig, *, runs_alone: bool = False
) -> type[PipelineModel[ScheduledRow]]:
    """The class for a checkpoint, see `find_architecture`.

    Raises `CheckpointError` naming the supported ones.
    """
    found_by_name = find_architecture(config.architecture, config.path, runs_alone=runs_alone)
    module, _, class_name = found_by_name.model.partition(":")
    found: type[PipelineModel[ScheduledRow]] = getattr(import_module(module), class_name)
    return found
