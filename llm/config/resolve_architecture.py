"""Resolution of fields that depend on the architecture: lookup, requirements, support, limits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.architectures import Architecture, find_architecture
from llm.config.strict import StrictModel
from llm.errors import ConfigError

if TYPE_CHECKING:
    from llm.config.fields import PipelineFields

logger = logging.getLogger("llm.config")


def resolve_for_architecture(config: PipelineFields) -> None:
    """Run the steps for a checkpoint. Raises `ConfigError`, `CheckpointError`."""
    values = config.model.read_architecture()
    source = Path(config.model.model_path) / "config.json"
    architecture = find_architecture(
        str(values["architectures"][0]), source, runs_alone=config.runs_alone
    )
    _apply_required_arguments(config, architecture)
    _check_support(config, architecture)
    _check_encoding(config, architecture)
    _check_length(config, architecture, values)


def _apply_required_arguments(config: PipelineFields, architecture: Architecture) -> None:
    for name, value in architecture.required_arguments:
        section, field = _locate(config, name, architecture)
        given = getattr(section, field)
        if given == value:
            continue
        if config.force:
            text = "%s=%s is kept by force, though %s needs %s"
            logger.warning(text, name, given, architecture.name, value)
        else:
            logger.warning("%s=%s becomes %s: %s needs it", name, given, value, architecture.name)
            setattr(section, field, value)


def _locate(config: StrictModel, name: str, architecture: Architecture) -> tuple[StrictModel, str]:
    *sections, field = name.split(".")
    found: Any = config
    for section in sections:
        found = getattr(found, section, None)
    if not isinstance(found, StrictModel) or field not in type(found).model_fields:
        raise ConfigError(f"architecture {architecture.name} requires an unknown field '{name}'")
    return found, field


def _check_support(config: PipelineFields, architecture: Architecture) -> None:
    if config.execute_empty_batches and not architecture.supports_empty_batches:
        raise ConfigError(f"execute_empty_batches: {architecture.name} cannot run empty batches")
    if config.ep_size > 1 and not architecture.has_experts:
        raise ConfigError(f"ep_size={config.ep_size}: {architecture.name} has no experts")
    if config.draft_model is not None and not architecture.supports_drafts:
        raise ConfigError(f"draft_model: {architecture.name} cannot verify what is drafted")
    lora = config.lora
    if lora is None or not lora.enable_lora:
        return
    lora.adapters()
    if not architecture.supports_lora:
        raise ConfigError(f"lora: {architecture.name} does not take adapters")


def _check_encoding(config: PipelineFields, architecture: Architecture) -> None:
    encoding = config.model.quantization_encoding
    if encoding is not None and encoding not in architecture.encodings:
        known = ", ".join(architecture.encodings)
        raise ConfigError(
            f"model.quantization_encoding={encoding}: {architecture.name} runs as {known}"
        )


def _check_length(
    config: PipelineFields, architecture: Architecture, values: dict[str, Any]
) -> None:
    limit = architecture.max_length(values)
    if limit is not None and config.max_length is not None and config.max_length > limit:
        raise ConfigError(
            f"max_length={config.max_length} exceeds the model's {architecture.length_key}={limit}"
        )
    if architecture.needs_total_tokens_limit:
        config.max_batch_total_tokens = config.max_length or limit
