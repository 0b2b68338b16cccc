"""`PipelineFields`: all fields of the core's configuration, with names and defaults."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from llm.config.sections import (
    LoRAConfig,
    ModelConfig,
    PipelineRole,
    ProfilingConfig,
    QuantizationEncoding,
    SamplingConfig,
    SharedLimits,
    SpeculativeConfig,
)
from llm.config.strict import StrictModel

MAX_IPC_PATH_BYTES = 107  # sun_path of AF_UNIX, without its final NUL
LONGEST_ENDPOINT_SUFFIX = len("-response")


class PipelineFields(StrictModel):
    """Fields of a `PipelineConfig`, checked one by one, and values derived from single fields."""

    TASK: ClassVar[str] = "text generation"

    config_file: str | None = Field(default=None, description="YAML, JSON or TOML file of values")
    section_name: str | None = Field(
        default=None, description="section of the file to read (default: the configuration's own)"
    )
    max_length: int | None = Field(
        default=None, gt=0, description="longest sequence in tokens (default: the model's limit)"
    )
    pipeline_role: PipelineRole = Field(
        default=PipelineRole.PrefillAndDecode,
        description="what this engine does: prompts for other engines (prefill_only), generation "
        "from prompts of others (decode_only), or all (prefill_and_decode)",
    )
    prefill_endpoints: list[str] = Field(
        default_factory=list,
        description="zmq_endpoint_base of an engine with prefill_only, for decode_only; give the "
        "flag again for more",
    )
    max_batch_size: int | None = Field(
        default=None,
        gt=0,
        description="requests in one batch (default: by KV memory)",
    )
    max_queue_size_tg: int | None = Field(
        default=None,
        gt=0,
        description="maximum number of decoding requests (default: max_batch_size)",
    )
    min_batch_size_tg: int | None = Field(
        default=None,
        ge=0,
        description="no prompt starts while at least this many requests decode; 0: until none "
        "decodes (default: max_queue_size_tg)",
    )
    ep_size: int = Field(
        default=1,
        ge=1,
        description="experts on several devices; 1: each has a part of every expert; the number of "
        "a model's devices: each has some experts whole",
    )
    ce_delay_ms: float = Field(
        default=0.0,
        ge=0,
        description="how long a prompt waits for others to share its step",
    )
    enable_prioritize_first_decode: bool = Field(
        default=False, description="decode new requests right after their prefill"
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="split prompts that exceed the token budget of a step"
    )
    enable_in_flight_batching: bool = Field(
        default=True, description="put decode and prefill tokens into one batch"
    )
    max_num_steps: int = Field(
        default=-1,
        ge=-1,
        description="decode steps per turn; -1 is the default "
        "(default: 10 on a GPU, 1 on the CPU and with overlap)",
    )
    max_batch_input_tokens: int = Field(default=8192, gt=0, description="token budget of one step")
    enable_echo: bool = Field(
        default=False, description="accept echo: log-probabilities of the prompt's tokens"
    )
    pool_embeddings: bool = Field(
        default=True, description="return one embedding per input; off: one per token"
    )
    chat_template: Path | None = Field(
        default=None, description="file that replaces the tokenizer's chat template"
    )
    use_experimental_kernels: str = Field(
        default="false", description="use kernels that are not yet the default: true or false"
    )
    use_vendor_blas: str = Field(
        default="false",
        description="multiply with torch's BLAS and expand int8 weights: true or false",
    )
    pdl_level: str = Field(
        default="0",
        description="programmatic dependent launch of a GPU's kernels: 0: none starts before the "
        "one in front of it has ended; 1: when that one is about to end; 2: when it begins",
    )
    custom_architectures: list[str] = Field(
        default_factory=list,
        description="modules that register architectures, each MODULE or FOLDER:MODULE",
    )
    zmq_endpoint_base: str = Field(
        default_factory=lambda: f"ipc://{tempfile.gettempdir()}/sonant-{secrets.token_hex(9)}",
        description="where front ends reach the engine: ipc://PATH, or tcp://HOST:PORT and the "
        "four ports after it, more for several engines (default: a new socket)",
    )
    execute_empty_batches: bool = Field(
        default=False,
        description="run a forward every 5 ms while there are no requests: all devices take part",
    )
    max_batch_total_tokens: int | None = Field(
        default=None,
        gt=0,
        description="most context tokens of a step with prompts (default: no cap)",
    )
    allow_pickle: bool = Field(
        default=False, description="read weights from pickles; code in them is not run"
    )
    force: bool = Field(default=False, description="skip the checks against the architecture")
    kvcache_ce_watermark: float = Field(
        default=0.95, gt=0, le=1, description="share of KV pages up to which prompts are admitted"
    )
    enable_overlap_scheduler: bool = Field(
        default=False,
        description="prepare the next batch while one runs (default: on for speech on a GPU)",
    )
    use_legacy_module: bool = Field(
        default=True, description="run layers eagerly; off: compile them with torch"
    )
    defer_resolve: bool = Field(
        default=False, description="leave resolving to a later call; a server resolves in any case"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    draft_model: ModelConfig | None = Field(
        default=None, description="the section of a smaller model that drafts tokens"
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="sampling")
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig, description="profiling")
    lora: LoRAConfig | None = Field(default=None, description="the section of adapters")
    speculative: SpeculativeConfig | None = Field(
        default=None, description="the section of speculative decoding"
    )

    @field_validator("max_num_steps")
    @classmethod
    def _steps(cls, steps: int) -> int:
        if steps == 0:
            raise ValueError("must be -1 (by device) or at least 1")
        return steps

    @field_validator("prefill_endpoints")
    @classmethod
    def _prefill_endpoints(cls, bases: list[str]) -> list[str]:
        return [cls._endpoint(base) for base in bases]

    @field_validator("zmq_endpoint_base")
    @classmethod
    def _endpoint(cls, base: str) -> str:
        scheme, found, path = base.partition("://")
        if not found or scheme not in ("ipc", "tcp", "inproc"):
            raise ValueError(f"'{base}' must start with ipc://, tcp:// or inproc://")
        longest = len(path.encode()) + LONGEST_ENDPOINT_SUFFIX
        if scheme == "ipc" and longest > MAX_IPC_PATH_BYTES:
            raise ValueError(f"'{base}' is too long: a socket path has {MAX_IPC_PATH_BYTES} bytes")
        return base

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in SharedLimits.model_fields or name == "model":
            self._share_limits()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._share_limits()

    def _share_limits(self) -> None:
        limits = SharedLimits(**{name: getattr(self, name) for name in SharedLimits.model_fields})
        self.model.share(limits)

    @property
    def runs_alone(self) -> bool:
        """Whether requests share nothing: one at a time, and no prefix cache."""
        return self.max_batch_size == 1 and not self.model.kv_cache.enable_prefix_caching

    @property
    def is_test_mode(self) -> bool:
        """Whether a model without weight files runs on random weights."""
        return False

    @property
    def max_active_adapters(self) -> int | None:
        """Number of adapters that may run at once; None: there are none."""
        lora = self.lora
        return lora.max_num_loras if lora is not None and lora.enable_lora else None

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The weight-only quantisation of the model; None for plain number formats."""
        encoding = self.model.quantization_encoding
        return None if encoding is None or encoding.is_plain else encoding
