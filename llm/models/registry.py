"""The class of a checkpoint's architecture, imported on demand."""

from __future__ import annotations

from importlib import import_module

from llm.batch import ScheduledRow
from llm.config.architectures import find_architecture
from llm.errors import ConfigError
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig


def model_class(
    config: HuggingFaceConfig, *, runs_alone: bool = False
) -> type[PipelineModel[ScheduledRow]]:
    """Return the class for a checkpoint, see `find_architecture`.

    Raises `CheckpointError` naming the supported ones, `ConfigError` for a class that is no model.
    """
    name = config.architecture
    architecture = find_architecture(name, config.path, runs_alone=runs_alone)
    module, _, class_name = architecture.model.partition(":")
    try:
        found = getattr(import_module(module), class_name)
    except ImportError as error:
        raise ConfigError(f"architecture {name}: cannot import {module}: {error}") from error
    except AttributeError:
        raise ConfigError(f"architecture {name}: {module} has no {class_name}") from None
    if not (isinstance(found, type) and issubclass(found, PipelineModel)):
        raise ConfigError(f"architecture {name}: {architecture.model} is no PipelineModel")
    if lacking := ", ".join(sorted(found.__abstractmethods__)):
        raise ConfigError(f"architecture {name}: {architecture.model} lacks {lacking}")
    return found
