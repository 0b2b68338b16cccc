"""Log output of a configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm.config.sections import KVCacheConfig, ModelConfig
from llm.errors import ConfigError

if TYPE_CHECKING:
    from llm.config.fields import PipelineFields

logger = logging.getLogger("llm.config")


@dataclass(frozen=True, slots=True)
class RunningPlan:
    """Values that were determined when the model was loaded."""

    pipeline: str  # class
    encoding: str  # of weights and activations
    max_seq_len: int
    max_batch_size: int
    kv_bytes: int  # size of the KV cache
    draft_kv_bytes: int = 0  # part of it for the draft model
    linear_layers: tuple[tuple[str, int], ...] = ()  # class and number of layers
    in_flight_batching: bool = True
    attention: str = "unknown"  # backend that computes it
    kernels: tuple[str, ...] = ()  # enabled built-in kernels
    launch_level: int = 0  # level of programmatic dependent launch in effect


def log_basics(config: PipelineFields, plan: RunningPlan | None) -> None:
    """See `PipelineConfig.log_basic_config`."""
    model = config.model
    architecture = ", ".join(model.read_architecture()["architectures"])
    if plan is None:
        raise ConfigError("the memory of the KV cache is not planned: make an engine first")
    _log(
        ("model", _name(model)),
        ("architecture", architecture),
        ("task", config.TASK),
        ("pipeline", plan.pipeline),
        ("weights", _abbreviated([str(path) for path in model.weight_path])),
        ("devices", ", ".join(model.device_specs)),
        ("max_batch_size", _batch_size(config, plan)),
        ("max_seq_len", plan.max_seq_len),
        ("reserved memory", _mib(plan.kv_bytes)),
    )


def log_pipeline(config: PipelineFields, plan: RunningPlan | None) -> None:
    """See `PipelineConfig.log_pipeline_info`."""
    log_basics(config, plan)
    assert plan is not None
    _log(
        ("encoding", plan.encoding),
        ("weight-only quantisation", config.graph_quantization_encoding or "none"),
        ("linear layers", ", ".join(f"{n} {name}" for name, n in plan.linear_layers) or "none"),
        ("modules", "as written" if config.use_legacy_module else "compiled"),
        ("attention", plan.attention),
        ("built-in kernels", ", ".join(plan.kernels) or "none"),
        ("dependent launch", plan.launch_level or "off"),
        ("max_batch_input_tokens", config.max_batch_input_tokens),
        ("max_batch_total_tokens", config.max_batch_total_tokens or "no cap"),
        ("max_queue_size_tg", config.max_queue_size_tg or plan.max_batch_size),
        ("chunked prefill", config.enable_chunked_prefill),
        ("in-flight batching", plan.in_flight_batching),
        ("decode steps per turn", config.max_num_steps),
        ("KV watermark", f"{config.kvcache_ce_watermark:.0%}"),
    )
    _log_cache(config.model.kv_cache, plan.kv_bytes - plan.draft_kv_bytes)
    if config.draft_model is not None:
        _log(("draft model", _name(config.draft_model)), ("draft KV", _mib(plan.draft_kv_bytes)))
    if config.lora is not None and config.lora.enable_lora:
        lora = config.lora
        _log(("adapters", f"{lora.max_num_loras} at once, rank {lora.max_lora_rank} at most"))


def _log_cache(cache: KVCacheConfig, num_bytes: int) -> None:
    swap_space = f"{cache.host_kvcache_swap_space_gb:g} GiB"
    _log(
        ("KV page size", cache.kv_cache_page_size),
        ("prefix caching", cache.enable_prefix_caching),
        ("swapping to host", swap_space if cache.enable_kvcache_swapping_to_host else False),
        ("memory utilization", f"{cache.device_memory_utilization:.0%}"),
        ("available cache memory", f"{num_bytes} bytes"),
    )


def _batch_size(config: PipelineFields, plan: RunningPlan) -> str:
    is_inferred = config.max_batch_size is None
    return f"{plan.max_batch_size}{', from KV memory' if is_inferred else ''}"


def _name(model: ModelConfig) -> str:
    return model.served_model_name or Path(model.model_path).name


def _log(*lines: tuple[str, object]) -> None:
    for name, value in lines:
        logger.info("%s: %s", name, value)


def _abbreviated(paths: list[str]) -> str:
    """Format at most five paths and the number of others; the folder's name when there are none."""
    if not paths:
        return "those in the model's folder"
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
