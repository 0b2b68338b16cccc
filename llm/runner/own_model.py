"""Which model a runner loads, and what its weights are called."""

from __future__ import annotations

from llm.config import ModelConfig, PipelineConfig
from llm.models.weights import Weights, WeightsAdapter

ROOT = "model."


def with_model(
    config: PipelineConfig, model: ModelConfig | None, gpu_id: int | None
) -> PipelineConfig:
    """The configuration with another model, or the same on another GPU."""
    wanted = config.model if model is None else model
    changes = {}
    if gpu_id is not None and not wanted.on_cpu and wanted.device_specs != [f"cuda:{gpu_id}"]:
        changes = {"device_specs": [f"cuda:{gpu_id}"]}
    if wanted is config.model and not changes:
        return config
    changed = wanted.model_dump() | changes
    kept = config.model_dump(exclude_unset=True, exclude={"config_file", "section_name"})
    return type(config)(**kept | {"model": changed})


def with_root(weights: Weights) -> WeightsAdapter | None:
    """Models without a head are stored without the name they have beside one."""
    if any(name.startswith(ROOT) for name in weights.info()):
        return None
    return lambda name: name if name.startswith("lm_head") else ROOT + name
