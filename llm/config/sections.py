"""The sections of a configuration: model, KV cache, sampling, profiling, adapters, drafting."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from llm.config.strict import StrictModel
from llm.errors import ConfigError


class PipelineRole(StrEnum):
    """Role of this process in disaggregated serving."""

    PrefillAndDecode = "prefill_and_decode"
    PrefillOnly = "prefill_only"
    DecodeOnly = "decode_only"


class QuantizationEncoding(StrEnum):
    """Format of the weights in memory."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"  # GPU
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # weight-only, one scale per output row, CPU
    FLOAT8_E4M3FN = "float8_e4m3fn"  # layers' matrices and their inputs
    # keep the matrices of a checkpoint that is stored so
    FLOAT4_E2M1FNX2 = "float4_e2m1fnx2"  # NVFP4
    GPTQ = "gptq"
    Q4_K = "q4_k"
    Q4_0 = "q4_0"
    Q6_K = "q6_k"

    @property
    def is_plain(self) -> bool:
        """Whether this is a number format of the hardware, rather than a weight-only
        quantisation.
        """
        formats = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fnx2")
        return self in formats


_BOTH = tuple(
    map(
        QuantizationEncoding,
        (
            *("float32", "bfloat16", "float8_e4m3fn", "float4_e2m1fnx2"),
            *("gptq", "q4_k", "q4_0", "q6_k"),
        ),
    )
)
CPU_ENCODINGS = frozenset({*_BOTH, QuantizationEncoding.INT8})
GPU_ENCODINGS = frozenset({*_BOTH, QuantizationEncoding.FLOAT16})


def switch(name: str, text: str) -> bool:
    """Parse an on/off string in any case. Raises `ConfigError` naming the field."""
    values = {"true": True, "on": True, "yes": True, "1": True}
    values |= {"false": False, "off": False, "no": False, "0": False}
    if text.lower() not in values:
        raise ConfigError(f"{name}={text} must be true or false")
    return values[text.lower()]


class RopeType(StrEnum):
    """Pairing of a head's values by a rotation, in the weights of queries and keys."""

    NEOX = "neox"  # i and i + D/2, as transformers stores them
    NORMAL = "normal"  # neighbours, as Meta and Mistral do


class KVCacheConfig(StrictModel):
    """The paged key-value cache."""

    kv_cache_page_size: int = Field(
        default=128, gt=0, description="tokens per page (default: 128; 32 without a model path)"
    )
    num_pages: int | None = Field(
        default=None, gt=1, description="pages in the pool (default: by free memory)"
    )
    enable_prefix_caching: bool = Field(
        default=True, description="reuse the KV pages of equal prompt prefixes"
    )
    enable_kvcache_swapping_to_host: bool = Field(
        default=False, description="move evicted pages to host memory"
    )
    host_kvcache_swap_space_gb: float = Field(
        default=50.0, ge=0, description="host memory for evicted pages"
    )
    device_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of the device's memory that may be used"
    )
    kv_cache_format: Literal["float32", "float16", "bfloat16", "float8_e4m3fn"] | None = Field(
        default=None, description="number format of keys and values (default: the model's)"
    )


class SharedLimits(StrictModel):
    """Values of `PipelineConfig` that can also be read on its `model`."""

    max_length: int | None = None
    enable_echo: bool = False
    pool_embeddings: bool = True
    chat_template: Path | None = None


class ModelConfig(StrictModel):
    """One model: its files, the format of its weights, its device."""

    model_path: str = Field(
        default="", description="folder of the checkpoint, or its name on the hub"
    )
    served_model_name: str | None = Field(
        default=None, description="model name in answers (default: the folder's or hub name)"
    )
    weight_path: list[Path] = Field(
        default_factory=list, description="weight files (default: those in model_path)"
    )
    quantization_encoding: QuantizationEncoding | None = Field(
        default=None,
        description="number format of weights, float16 on a GPU and int8 on a CPU only; "
        "float8_e4m3fn is that of the layers' matrices and their inputs; gptq, q4_0, q4_k, q6_k "
        "and float4_e2m1fnx2 keep the packed matrices of a checkpoint that is stored so (default: "
        "the checkpoint's, or best for the device)",
    )
    device_specs: list[str] = Field(
        default_factory=lambda: ["cpu"],
        min_length=1,
        description="cpu, cuda:N or several (default: by the model)",
    )
    data_parallel_degree: int = Field(
        default=1,
        ge=1,
        le=64,
        description="replicas: engines, each with a share of the devices; all share a single one",
    )
    trust_remote_code: bool = Field(default=False, description="run code from the checkpoint")
    huggingface_revision: str = Field(
        default="main", description="branch, tag or commit on the hub"
    )
    rope_type: RopeType | None = Field(
        default=None, description="rotary layout of the weights (default: by file names)"
    )
    disable_cuda_graph: bool = Field(
        default=False, description="launch decode kernels one by one, without CUDA graphs"
    )
    attention_backend: Literal["auto", "sdpa", "gathered", "flashinfer"] = Field(
        default="auto",
        description="attention kernels; auto is flashinfer on a GPU if installed",
    )
    batch_invariant: bool = Field(
        default=False, description="on a GPU, choose the same tokens in any batch, more slowly"
    )
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig, description="KV cache")
    _shared: SharedLimits = PrivateAttr(default_factory=SharedLimits)

    @field_validator("device_specs")
    @classmethod
    def _device_names(cls, specs: list[str]) -> list[str]:
        for spec in specs:
            if not re.fullmatch(r"cpu|cuda(:\d+)?", spec):
                raise ValueError(f"'{spec}' is not a device; use cpu or cuda:N")
        return ["cuda:0" if spec == "cuda" else spec for spec in specs]

    @property
    def max_length(self) -> int | None:
        """Value of `PipelineConfig.max_length`, where it is set."""
        return self._shared.max_length

    @property
    def enable_echo(self) -> bool:
        """Value of `PipelineConfig.enable_echo`."""
        return self._shared.enable_echo

    @property
    def pool_embeddings(self) -> bool:
        """Value of `PipelineConfig.pool_embeddings`."""
        return self._shared.pool_embeddings

    @property
    def chat_template(self) -> Path | None:
        """Value of `PipelineConfig.chat_template`."""
        return self._shared.chat_template

    def share(self, limits: SharedLimits) -> None:
        """Copy the values that this section shows but does not own."""
        self._shared = limits

    @property
    def on_cpu(self) -> bool:
        return self.device_specs[0] == "cpu"

    def devices_of_replica(self, number: int) -> list[str]:
        """Return the devices of a replica, by its number from 0. All share a single device."""
        if len(self.device_specs) == 1:
            return self.device_specs
        size = len(self.device_specs) // self.data_parallel_degree
        return self.device_specs[number * size : (number + 1) * size]

    def read_architecture(self) -> dict[str, Any]:
        """Return the checkpoint's config.json. Raises `ConfigError` when it names no
        architecture.
        """
        path = Path(self.model_path) / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        names = values.get("architectures") if isinstance(values, dict) else None
        if not (isinstance(names, list) and names):
            raise ConfigError(f"{path} names no architecture")
        return values


class SamplingConfig(StrictModel):
    """Features of the sampler."""

    in_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="round logits to this format before sampling"
    )
    out_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="round log-probabilities to this format"
    )
    enable_structured_output: bool = Field(default=False, description="accept JSON schemas")
    enable_variable_logits: bool = Field(
        default=False,
        description="reserve memory for logits of every token; enable_echo turns it on",
    )
    enable_penalties: bool = Field(
        default=True, description="accept penalties; next to a draft model only if set"
    )
    enable_min_tokens: bool = Field(default=True, description="accept minimum lengths")


class ProfilingConfig(StrictModel):
    """Settings of the profiler."""

    gpu_profiling: Literal["off", "on", "detailed"] = Field(
        default="off",
        description="mark phases of a step for a profiler; detailed: their parts, too",
    )
    trace_file: Path | None = Field(
        default=None, description="file for a trace of some steps (default: no trace)"
    )
    trace_after: int = Field(default=200, ge=0, description="steps before the trace begins")
    trace_steps: int = Field(default=50, gt=0, description="steps in the trace")


class LoRAConfig(StrictModel):
    """Low-rank adapters that are served with the base model."""

    enable_lora: bool = Field(default=False, description="serve adapters")
    lora_paths: list[str] = Field(
        default_factory=list, description="folders of adapters, each FOLDER or NAME=FOLDER"
    )
    max_lora_rank: int = Field(default=16, gt=0, description="largest accepted rank")
    max_num_loras: int = Field(
        default=1, gt=0, description="adapters in one batch; requests for others wait"
    )

    def adapters(self) -> dict[str, Path]:
        """Return folders by name; without a name, the folder's own.

        Raises `ConfigError` for an invalid or duplicate name, and for a missing folder.
        """
        found: dict[str, Path] = {}
        for entry in self.lora_paths:
            name, separator, folder = entry.rpartition("=")
            path = Path(folder).expanduser()
            name = name if separator else path.resolve().name
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ConfigError(f"lora.lora_paths: '{name}' is no name; write NAME=FOLDER")
            if name in found:
                raise ConfigError(f"lora.lora_paths: adapter '{name}' is given twice")
            if not path.is_dir():
                raise ConfigError(f"lora.lora_paths: {path} is not a folder")
            found[name] = path
        return found


class SpeculativeConfig(StrictModel):
    """Speculative decoding."""

    speculative_method: Literal["standalone", "eagle", "mtp"] = Field(
        default="standalone", description="source of drafted tokens"
    )
    num_speculative_tokens: int = Field(default=5, gt=0, description="drafted tokens per step")
    rejection_strategy: Literal["greedy", "residual", "typical-acceptance", "logit-comparison"] = (
        Field(default="greedy", description="rule that accepts drafted tokens")
    )
