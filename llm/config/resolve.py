"""The steps of `PipelineConfig.resolve`, in order. Each has an error of its own.

They need no device and no torch, so that a front end resolves a configuration like the engine.
Values that depend on the device (the number of KV pages, and so whether `max_length` is reduced)
are determined when the engine plans its memory.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm.config.resolve_architecture import resolve_for_architecture
from llm.config.sections import (
    CPU_ENCODINGS,
    GPU_ENCODINGS,
    ModelConfig,
    PipelineRole,
    SpeculativeConfig,
    switch,
)
from llm.errors import ConfigError

if TYPE_CHECKING:
    from llm.config.fields import PipelineFields

logger = logging.getLogger("llm.config")

DEFAULT_STEPS_ON_GPU = 10
CPU, FIRST_GPU = "cpu", "cuda:0"
CUDA_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
CUDA_SUCCESS = 0


def resolve_steps(config: PipelineFields) -> None:
    """Run all steps. Raises `ConfigError` or `CheckpointError` naming the field and its value."""
    for step in _STEPS:
        step(config)
    if config.model.model_path:
        resolve_for_architecture(config)
    resolve_batch_limits(config)


def resolve_devices(config: PipelineFields) -> None:
    """Set the devices if unset: a GPU for each replica if there is one, else the CPU for all.

    A draft model uses its target's device.
    """
    if "device_specs" not in config.model.model_fields_set:
        device, count = default_device(), config.model.data_parallel_degree
        is_shared = device == CPU
        config.model.device_specs = [device] if is_shared else [f"cuda:{n}" for n in range(count)]
    draft = config.draft_model
    if draft is not None and "device_specs" not in draft.model_fields_set:
        draft.device_specs = config.model.device_specs


def default_device() -> str:
    """Return the first CUDA device that this process may use, or the CPU."""
    return FIRST_GPU if has_cuda() else CPU


def has_cuda() -> bool:
    """Whether torch is built for CUDA and the driver finds a device. Allocates nothing on it."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
        if version("torch").endswith("+cpu"):
            return False
    except (PackageNotFoundError, OSError):
        return False
    count = ctypes.c_int(0)
    is_usable = (
        driver.cuInit(0) == CUDA_SUCCESS
        and driver.cuDeviceGetCount(ctypes.byref(count)) == CUDA_SUCCESS
    )
    return is_usable and count.value > 0


def resolve_models(config: PipelineFields) -> None:
    """Check files and devices of the model and of the draft model."""
    _check_model("model", config.model)
    if config.draft_model is not None:
        _check_model("draft_model", config.draft_model)
    _check_devices(config.model)
    _check_experts(config)
    if len(config.model.devices_of_replica(0)) > 1:
        _check_several_devices(config)


def _check_model(name: str, model: ModelConfig) -> None:
    if model.model_path and not Path(model.model_path).is_dir():
        raise ConfigError(f"{name}.model_path={model.model_path} is not a folder")
    for path in model.weight_path:
        if not path.is_file():
            raise ConfigError(f"{name}.weight_path: {path} is not a file")
    encoding, place = model.quantization_encoding, "CPU" if model.on_cpu else "GPU"
    runs_on = CPU_ENCODINGS if model.on_cpu else GPU_ENCODINGS
    if encoding is not None and encoding not in runs_on:
        other = "GPU" if model.on_cpu else "CPU"
        raise ConfigError(
            f"{name}.quantization_encoding={encoding} runs on the {other} only, "
            f"and device_specs names a {place}"
        )


def _check_devices(model: ModelConfig) -> None:
    """Raise `ConfigError` for devices that cannot share a model, or be divided among replicas."""
    devices, specs = model.device_specs, ",".join(model.device_specs)
    is_distinct = len(set(devices)) == len(devices)
    if len(devices) > 1 and not (set(devices) == {CPU} or (is_distinct and CPU not in devices)):
        raise ConfigError(
            f"model.device_specs={specs} must name different GPUs, or the CPU several times"
        )
    count = model.data_parallel_degree
    if len(devices) > 1 and len(devices) % count:
        raise ConfigError(
            f"model.device_specs={specs} cannot be divided among "
            f"model.data_parallel_degree={count} replicas: name as many devices for each, or one "
            "for all"
        )


def _check_experts(config: PipelineFields) -> None:
    """Raise `ConfigError` for a number of ranks with experts that is not that of a model."""
    count = len(config.model.devices_of_replica(0))
    if config.ep_size not in (1, count):
        specs = ",".join(config.model.device_specs)
        raise ConfigError(
            f"ep_size={config.ep_size} must be 1 or the number of devices of one model, which is "
            f"{count} with model.device_specs={specs}"
        )


def _check_several_devices(config: PipelineFields) -> None:
    """Raise `ConfigError` for what needs a model on one device."""
    model = config.model
    specs = ",".join(model.device_specs)
    lora, cache = config.lora, model.kv_cache
    refused = {
        "lora": lora is not None and lora.enable_lora,
        "draft_model": config.draft_model is not None,
        "sampling.enable_structured_output": config.sampling.enable_structured_output,
        "model.kv_cache.enable_kvcache_swapping_to_host": cache.enable_kvcache_swapping_to_host,
        "use_legacy_module=False": not config.use_legacy_module,
    }
    found = [name for name, is_set in refused.items() if is_set]
    if found:
        raise ConfigError(
            f"{', '.join(found)}: needs one device, and model.device_specs={specs} names several"
        )


def resolve_num_steps(config: PipelineFields) -> None:
    """Set the number of forwards per step if unset: one where each token is read anyway, else ten.

    With a draft model a step is one verification, and yields one token more than is drafted.
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


def _resolve_drafted_steps(config: PipelineFields) -> None:
    if config.speculative is None:
        config.speculative = SpeculativeConfig()
    num_steps = 1 + config.speculative.num_speculative_tokens
    if config.max_num_steps not in (-1, 1, num_steps):
        raise ConfigError(
            f"max_num_steps={config.max_num_steps} cannot be set with a draft_model: "
            f"speculative.num_speculative_tokens makes it {num_steps}"
        )
    config.max_num_steps = num_steps


def resolve_sampling(config: PipelineFields) -> None:
    """Turn on the penalties and minimum lengths that the model's generation_config.json sets.

    With a draft model penalties are turned off unless the configuration sets them.
    """
    sampling = config.sampling
    are_asked_for = "enable_penalties" in sampling.model_fields_set and sampling.enable_penalties
    for name, is_recommended in _generation_defaults(config.model).items():
        if is_recommended:
            setattr(sampling, name, True)
    if config.draft_model is not None and sampling.enable_penalties and not are_asked_for:
        logger.warning("sampling.enable_penalties is turned off with a draft model")
        sampling.enable_penalties = False


def _generation_defaults(model: ModelConfig) -> dict[str, bool]:
    """Return the switches that the model's generation_config.json requires."""
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


def resolve_kernels(config: PipelineFields) -> None:
    """Check switches, the launch level, and the attention backend."""
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
    """Parse `pdl_level`: 0, 1 or 2. Raises `ConfigError` for any other text."""
    if text not in ("0", "1", "2"):
        raise ConfigError(f"pdl_level={text} must be 0, 1 or 2")
    return int(text)


def resolve_drafting(config: PipelineFields) -> None:
    """Check that a draft model, its method and its vocabulary match the model."""
    speculative = config.speculative
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
    """Return the vocabulary of tokenizer.json; None without one."""
    path = Path(model.model_path) / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return values.get("model", {}).get("vocab"), values.get("added_tokens")


def resolve_echo(config: PipelineFields) -> None:
    """Check `enable_echo`: a prompt's log-probabilities need logits of every token."""
    if config.enable_echo:
        config.sampling.enable_variable_logits = True


def resolve_overlap(config: PipelineFields) -> None:
    """Check overlap: it needs an asynchronous device; with `force` it stays on, and every step is
    waited for.
    """
    if not (config.enable_overlap_scheduler and config.model.on_cpu):
        return
    if not config.force:
        raise ConfigError("enable_overlap_scheduler=True needs a GPU: the CPU runs steps at once")
    logger.warning("enable_overlap_scheduler is kept by force; nothing overlaps on the CPU")


def resolve_batch_limits(config: PipelineFields) -> None:
    """Set sizes of batches and queues. Without a `max_batch_size` the memory plan sets them."""
    if (config.max_batch_size or 1) > config.max_batch_input_tokens:
        raise ConfigError(
            f"max_batch_input_tokens={config.max_batch_input_tokens} must be at least "
            f"max_batch_size={config.max_batch_size}: every row of a batch is a token"
        )
    for name, value in batch_limits(config, config.max_batch_size).items():
        setattr(config, name, value)
    total, length = config.max_batch_total_tokens, config.max_length
    if total is not None and length is not None and total < length:
        raise ConfigError(
            f"max_batch_total_tokens={total} must be at least max_length={length}: "
            "one sequence of that length could never run"
        )


def batch_limits(config: PipelineFields, rows: int | None) -> dict[str, int | None]:
    """Return `max_batch_size` and the sizes derived from it, by name; None is not set yet."""
    most, least = config.max_queue_size_tg, config.min_batch_size_tg
    most = rows if most is None else most
    least = most if least is None else least
    return {"max_batch_size": rows, "max_queue_size_tg": most, "min_batch_size_tg": least}


def resolve_kv_cache(config: PipelineFields) -> None:
    """Check that swapping to the host has a prefix cache, whose pages it swaps."""
    cache = config.model.kv_cache
    if cache.enable_kvcache_swapping_to_host and not cache.enable_prefix_caching:
        raise ConfigError(
            "model.kv_cache.enable_kvcache_swapping_to_host=True needs enable_prefix_caching"
        )


def resolve_role(config: PipelineFields) -> None:
    """Check what an engine needs whose prompts' pages come from another one, or go there."""
    role = config.pipeline_role
    if config.prefill_endpoints and role is not PipelineRole.DecodeOnly:
        raise ConfigError(f"prefill_endpoints needs pipeline_role={PipelineRole.DecodeOnly.value}")
    if role is not PipelineRole.PrefillAndDecode:
        check_moves_pages(config, f"pipeline_role={role.value}")


def check_moves_pages(config: PipelineFields, name: str) -> None:
    """Raise `ConfigError` for an engine that cannot move the pages of prompts, which `name` asks
    for.
    """
    model = config.model
    refused = {
        "draft_model: a draft needs pages of its own": config.draft_model is not None,
        "several devices for one engine": len(model.devices_of_replica(0)) > 1,
        "model.kv_cache.enable_prefix_caching=False": not model.kv_cache.enable_prefix_caching,
    }
    for reason, is_set in refused.items():
        if is_set:
            raise ConfigError(f"{name} excludes {reason}")


_STEPS: tuple[Callable[[PipelineFields], None], ...] = (
    resolve_devices,
    resolve_models,
    resolve_num_steps,
    resolve_sampling,
    resolve_drafting,
    resolve_echo,
    resolve_kv_cache,
    resolve_role,
    resolve_overlap,
    resolve_kernels,
)
