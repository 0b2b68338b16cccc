"""What a configuration says about itself in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm.config.pipeline import PipelineConfig

logger = logging.getLogger("llm.config")


def log_basics(config: PipelineConfig, reserved_bytes: int | None) -> None:
    """See `PipelineConfig.log_basic_config`."""
    model = config.model
    architecture = model.read_architecture()
    own_limit = architecture.get("max_position_embeddings", "unknown")
    _log(
        ("model", model.served_model_name or Path(model.model_path).name),
        ("architecture", ", ".join(architecture["architectures"])),
        ("task", "text generation"),
        ("weights", _abbreviated([str(path) for path in model.weight_path])),
        ("devices", ", ".join(model.device_specs)),
        ("max_batch_size", config.max_batch_size),
        ("max_seq_len", config.max_length or own_limit),
        ("reserved memory", "by device" if reserved_bytes is None else _mib(reserved_bytes)),
    )


def log_pipeline(config: PipelineConfig) -> None:
    """The limits of a batch and the KV cache; see `PipelineConfig.log_pipeline_info`."""
    cache = config.model.kv_cache
    swap_space = f"{cache.host_kvcache_swap_space_gb:g} GiB"
    _log(
        ("encoding", config.model.quantization_encoding or "by device"),
        ("max_batch_input_tokens", config.max_batch_input_tokens),
        ("max_batch_total_tokens", config.max_batch_total_tokens or "no cap"),
        ("chunked prefill", config.enable_chunked_prefill),
        ("in-flight batching", config.enable_in_flight_batching),
        ("decode steps per turn", config.max_num_steps),
        ("KV page size", cache.kv_cache_page_size),
        ("KV pages", cache.num_pages or "from memory"),
        ("prefix caching", cache.enable_prefix_caching),
        ("swapping to host", swap_space if cache.enable_kvcache_swapping_to_host else False),
        ("memory utilization", f"{cache.device_memory_utilization:.0%}"),
        ("KV watermark", f"{config.kvcache_ce_watermark:.0%}"),
    )


def _log(*lines: tuple[str, object]) -> None:
    for name, value in lines:
        logger.info("%-24s %s", name, value)


def _abbreviated(paths: list[str]) -> str:
    """At most five paths, and how many more there are; the folder's own when there are none."""
    if not paths:
        return "those in the model's folder"
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(paths[:5]) + more


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
