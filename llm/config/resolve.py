"""The steps of `PipelineConfig.resolve`, in their order. Each has an error of its own.

They need no device and no torch, so a front end resolves the same as the engine does. What only
the device can tell (how many KV pages fit, so whether `max_length` has to be cut) follows when
the engine plans its memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config import devices
from llm.config.not_yet import unavailable
from llm.config.resolve_architecture import resolve_for_architecture
from llm.config.sections import (
    CPU_ENCODINGS,
    GPU_ENCODINGS,
    ModelConfig,
    SpeculativeConfig,
    switch,
)
from llm.errors import ConfigError

if TYPE_CHECKING:
    from llm.config.pipeline import PipelineConfig

logger = logging.getLogger("llm.config")

DEFAULT_STEPS_ON_GPU = 10


def resolve_steps(config: PipelineConfig) -> None:
    """Run all steps. Raises `ConfigError` or `CheckpointError` naming the field and its value."""
    for step in _STEPS:
        step(config)
    if config.model.model_path:
        resolve_for_architecture(config)
    resolve_batch_limits(config)


def resolve_devices(config: PipelineConfig) -> None:
    """Where nobody says where to run: a GPU if there is one. A draft model goes with its target."""
    if "device_specs" not in config.model.model_fields_set:
        config.model.device_specs = [devices.default_device()]
    draft = config.draft_model
    if draft is not None and "device_specs" not in draft.model_fields_set:
        draft.device_specs = config.model.device_specs


def resolve_models(config: PipelineConfig) -> None:
    """Files and devices of the model and of the draft model."""
    _check_model("model", config.model)
    if config.draft_model is not None:
        _check_model("draft_model", config.draft_model)


def _check_model(name: str, model: ModelConfig) -> None:
    if model.model_path and not Path(model.model_path).is_dir():
        raise ConfigError(f"{name}.model_path={model.model_path} is not a folder")
    for path in model.weight_path:
        if not path.is_file():
            raise ConfigError(f"{name}.weight_path: {path} is not a file")
    if len(model.device_specs) > 1:
        specs = ",".join(model.device_specs)
        raise unavailable(f"{name}.device_specs", specs, "a model runs on one device")
    encoding, place = model.quantization_encoding, "CPU" if model.on_cpu else "GPU"
    runs_on = CPU_ENCODINGS if model.on_cpu else GPU_ENCODINGS
    if encoding is not None and encoding not in runs_on:
        other = "GPU" if model.on_cpu else "CPU"
        raise ConfigError(
            f"{name}.quantization_encoding={encoding} runs on the {other} only, "
            f"and device_specs names a {place}"
        )


def resolve_num_steps(config: PipelineConfig) -> None:
    """Unset: one decode forward per turn where each token is read anyway, ten elsewhere.

    With a draft model a turn is one verification, and yields one token more than is drafted.
    """
    if config.draft_model is not None:
        _resolve_drafted_steps(config)
        return
    overlap = config.enable_overlap_scheduler
    if overlap and config.max_num_steps > 1:
        raise ConfigError(
            f"max_num_steps={config.max_num_steps} must be 1 with enable_overlap_scheduler: "
            "the next step is prepared while one runs"
        )
    if config.max_num_steps == -1:
        reads_each = overlap or config.sampling.enable_structured_output or config.model.on_cpu
        config.max_num_steps = 1 if reads_each else DEFAULT_STEPS_ON_GPU


def _resolve_drafted_steps(config: PipelineConfig) -> None:
    if config.speculative is None:
        config.speculative = SpeculativeConfig()
    num_steps = 1 + config.speculative.num_speculative_tokens
    if config.max_num_steps not in (-1, 1, num_steps):
        raise ConfigError(
            f"max_num_steps={config.max_num_steps} cannot be set with a draft_model: "
            f"speculative.num_speculative_tokens makes it {num_steps}"
        )
    config.max_num_steps = num_steps


def resolve_sampling(config: PipelineConfig) -> None:
    """Penalties and minimum lengths: on, unless turned off by name or by drafting.

    A model whose own generation_config.json has them turns them on in any case. Beside a draft
    model they have to be asked for by name.
    """
    sampling = config.sampling
    are_asked_for = "enable_penalties" in sampling.model_fields_set and sampling.enable_penalties
    wanted = _generation_defaults(config.model)
    for name, is_wanted in wanted.items():
        if is_wanted or name not in sampling.model_fields_set:
            setattr(sampling, name, True)
    if config.draft_model is not None and sampling.enable_penalties and not are_asked_for:
        logger.warning("sampling.enable_penalties is turned off beside a draft model")
        sampling.enable_penalties = False


def _generation_defaults(model: ModelConfig) -> dict[str, bool]:
    """Which switches the model's generation_config.json asks for."""
    values = _read_generation_config(model)
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    has_penalties = any(values.get(key) not in (None, value) for key, value in neutral.items())
    has_minimum = any(values.get(key) for key in ("min_length", "min_new_tokens"))
    return {"enable_penalties": has_penalties, "enable_min_tokens": has_minimum}


def _read_generation_config(model: ModelConfig) -> dict[str, Any]:
    path = Path(model.model_path) / "generation_config.json"
    if not (model.model_path and path.is_file()):
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return values if isinstance(values, dict) else {}


def resolve_kernels(config: PipelineConfig) -> None:
    """Switches are on or off, dependent launch is one of its levels, attention can be computed."""
    switch("use_experimental_kernels", config.use_experimental_kernels)
    switch("use_vendor_blas", config.use_vendor_blas)
    level = launch_level(config.pdl_level)
    if level and config.model.on_cpu:
        logger.warning("pdl_level=%d has no effect on the CPU", level)
    for name, model in (("model", config.model), ("draft_model", config.draft_model)):
        if model is not None and model.attention_backend == "flashinfer" and model.on_cpu:
            raise ConfigError(
                f"{name}.attention_backend=flashinfer needs a CUDA device: leave it at auto, or "
                "set device_specs"
            )


def launch_level(text: str) -> int:
    """What `pdl_level` says: 0, 1 or 2. Raises `ConfigError` for any other text."""
    if text not in ("0", "1", "2"):
        raise ConfigError(f"pdl_level={text} must be 0, 1 or 2")
    return int(text)


def resolve_drafting(config: PipelineConfig) -> None:
    """A draft model and how it drafts go together; it must speak the model's own language."""
    speculative = config.speculative
    if speculative is not None and speculative.speculative_method != "standalone":
        method = speculative.speculative_method
        reason = "drafts come from a model of their own"
        raise unavailable("speculative.speculative_method", method, reason)
    if config.draft_model is None:
        if speculative is not None:
            raise ConfigError("speculative: the method standalone needs a draft_model")
        return
    if config.enable_echo:
        raise ConfigError("enable_echo=True cannot be used with a draft_model")
    if config.model.model_path and config.draft_model.model_path:
        _check_draft(config.model, config.draft_model)


def _check_draft(model: ModelConfig, draft: ModelConfig) -> None:
    own, other = model.read_architecture(), draft.read_architecture()
    for key in ("architectures", "vocab_size"):
        if own.get(key) != other.get(key):
            raise ConfigError(
                f"draft_model has {key}={other.get(key)}, the model {own.get(key)}: "
                "a draft model needs the same architecture and vocabulary"
            )
    if _vocabulary(model) != _vocabulary(draft):
        raise ConfigError("draft_model has a tokenizer.json with another vocabulary than the model")


def _vocabulary(model: ModelConfig) -> object:
    """What tokenizer.json spells; None where there is none."""
    path = Path(model.model_path) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return values.get("model", {}).get("vocab"), values.get("added_tokens")


def resolve_echo(config: PipelineConfig) -> None:
    """A prompt's own log-probabilities need logits of every token."""
    if config.enable_echo:
        config.sampling.enable_variable_logits = True


def resolve_overlap(config: PipelineConfig) -> None:
    """Overlap needs a device that is late; by force it stays on, and every step is waited for."""
    if not (config.enable_overlap_scheduler and config.model.on_cpu):
        return
    if not config.force:
        raise ConfigError("enable_overlap_scheduler=True needs a GPU: the CPU runs steps at once")
    logger.warning("enable_overlap_scheduler is kept by force; nothing overlaps on the CPU")


def resolve_batch_limits(config: PipelineConfig) -> None:
    """Sizes of batches and queues. Without a `max_batch_size` they wait for the memory plan."""
    if (config.max_batch_size or 1) > config.max_batch_input_tokens:
        raise ConfigError(
            f"max_batch_input_tokens={config.max_batch_input_tokens} must be at least "
            f"max_batch_size={config.max_batch_size}: every row of a batch is a token"
        )
    for name, value in batch_limits(config, config.max_batch_size).items():
        setattr(config, name, value)
    if "enable_in_flight_batching" not in config.model_fields_set:
        # Nobody who speaks is to wait for another one's prompt; off has to be asked for.
        config.enable_in_flight_batching = True
    total, length = config.max_batch_total_tokens, config.max_length
    if total is not None and length is not None and total < length:
        raise ConfigError(
            f"max_batch_total_tokens={total} must be at least max_length={length}: "
            "one sequence of that length could never run"
        )


def batch_limits(config: PipelineConfig, rows: int | None) -> dict[str, int | None]:
    """`max_batch_size` and what follows from it, by name; None is still open."""
    most, least = config.max_queue_size_tg, config.min_batch_size_tg
    most = rows if most is None else most
    least = most if least is None else least
    return {"max_batch_size": rows, "max_queue_size_tg": most, "min_batch_size_tg": least}


def resolve_kv_cache(config: PipelineConfig) -> None:
    """What goes to the host are pages of the prefix cache, so there must be one."""
    cache = config.model.kv_cache
    if cache.enable_kvcache_swapping_to_host and not cache.enable_prefix_caching:
        raise ConfigError(
            "model.kv_cache.enable_kvcache_swapping_to_host=True needs enable_prefix_caching"
        )


_STEPS: tuple[Callable[[PipelineConfig], None], ...] = (
    resolve_devices,
    resolve_models,
    resolve_num_steps,
    resolve_sampling,
    resolve_drafting,
    resolve_echo,
    resolve_kv_cache,
    resolve_overlap,
    resolve_kernels,
)
