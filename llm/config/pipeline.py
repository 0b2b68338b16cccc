"""`PipelineConfig`: everything that can be set about the core, with the seed's names and defaults.

A configuration is built from keywords (and an optional file), validated field by field (pydantic's
`ValidationError`), then resolved: checked as a whole (`ConfigError`), filled in, and frozen.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from pydantic import Field, PrivateAttr, field_validator

from llm.config.architectures import Architecture, register_architecture
from llm.config.chat_template import read_chat_template
from llm.config.not_yet import (
    NOT_YET_AVAILABLE,
    NOT_YET_AVAILABLE_VALUES,
    refuse_unavailable,
)
from llm.config.plugins import load_plugins
from llm.config.report import RunningPlan, log_basics, log_pipeline
from llm.config.resolve import (
    DEFAULT_STEPS_ON_GPU,
    batch_limits,
    launch_level,
    resolve_steps,
)
from llm.config.sections import (
    LoRAConfig,
    ModelConfig,
    PipelineRole,
    ProfilingConfig,
    QuantizationEncoding,
    SamplingConfig,
    SharedLimits,
    SpeculativeConfig,
    switch,
)
from llm.config.strict import StrictModel
from llm.errors import ConfigError

MAX_IPC_PATH_BYTES = 107  # sun_path of AF_UNIX, without its final NUL
LONGEST_ENDPOINT_SUFFIX = len("-response")


class Session(Protocol):
    """What `PipelineConfig.configure_session` sets."""

    gpu_profiling: str
    use_experimental_kernels: bool
    use_vendor_blas: bool
    pdl_level: int
    use_legacy_module: bool

    def trace_steps(self, path: Path, after: int, steps: int) -> None: ...


class PipelineConfig(StrictModel):
    """Configuration of the core. Keyword-only; frozen once resolved (which construction does).

    Explicit keywords win over `config_file`. What may stay None after `resolve()`: `max_length`
    (the model's limit), `max_batch_size` and the queue sizes that follow from it (from the memory
    that an engine finds: see `with_batch_size`), `max_batch_total_tokens` (no cap),
    `chat_template` (the tokenizer's own), `config_file` and `section_name` (no file), and the
    sections for what is not in use.
    """

    SECTION: ClassVar[str] = "pipeline_config"
    TASK: ClassVar[str] = "text generation"
    UNAVAILABLE: ClassVar[Mapping[str, str]] = NOT_YET_AVAILABLE
    UNAVAILABLE_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = NOT_YET_AVAILABLE_VALUES

    config_file: str | None = Field(default=None, description="YAML, JSON or TOML file of values")
    section_name: str | None = Field(default=None, description="which section of the file to read")
    max_length: int | None = Field(
        default=None, gt=0, description="most tokens of one sequence (default: the model's limit)"
    )
    pipeline_role: PipelineRole = Field(
        default=PipelineRole.PrefillAndDecode, description="prefill, decode, or both"
    )
    max_batch_size: int | None = Field(
        default=None,
        gt=0,
        description="most requests in one batch (default: what KV memory has room for, up to 1024)",
    )
    max_queue_size_tg: int | None = Field(
        default=None, gt=0, description="most requests decoding at once (default: max_batch_size)"
    )
    min_batch_size_tg: int | None = Field(
        default=None,
        ge=0,
        description="while so many decode, no prompt starts; 0: until nobody is left "
        "(default: max_queue_size_tg)",
    )
    ep_size: int = Field(default=1, ge=1, description="expert-parallel degree")
    ce_delay_ms: float = Field(
        default=0.0,
        ge=0,
        description="milliseconds that a prompt waits for others to share its step",
    )
    enable_prioritize_first_decode: bool = Field(
        default=False, description="decode new requests right after their prefill"
    )
    enable_chunked_prefill: bool = Field(
        default=True, description="split prompts that do not fit the token budget"
    )
    enable_in_flight_batching: bool = Field(
        default=False, description="put decode and prefill tokens into one batch (default: on)"
    )
    max_num_steps: int = Field(
        default=-1,
        ge=-1,
        description="decode forwards per turn; -1: 10 on a GPU, 1 on the CPU and with overlap",
    )
    max_batch_input_tokens: int = Field(
        default=8192, gt=0, description="most tokens fed in one step"
    )
    enable_echo: bool = Field(
        default=False, description="accept echo: log-probabilities of the prompt's tokens"
    )
    pool_embeddings: bool = Field(
        default=True, description="one embedding per input; off: one per token"
    )
    chat_template: Path | None = Field(
        default=None, description="file that replaces the tokenizer's chat template"
    )
    use_experimental_kernels: str = Field(
        default="false", description="own kernels that are still tried out: true or false"
    )
    use_vendor_blas: str = Field(
        default="false", description="torch's BLAS multiplies, int8 is expanded: true or false"
    )
    pdl_level: str = Field(default="0", description="programmatic dependent launch: 0, 1 or 2")
    custom_architectures: list[str] = Field(
        default_factory=list,
        description="modules that add architectures, each MODULE or FOLDER:MODULE",
    )
    zmq_endpoint_base: str = Field(
        default_factory=lambda: f"ipc://{tempfile.gettempdir()}/sonant-{secrets.token_hex(9)}",
        description="where front ends and engine meet: ipc://PATH, or tcp://HOST:PORT and the "
        "four ports after it",
    )
    execute_empty_batches: bool = Field(
        default=False, description="run the model also when there is nothing to run"
    )
    max_batch_total_tokens: int | None = Field(
        default=None,
        gt=0,
        description="most context of a step with prompts, in tokens (default: no cap)",
    )
    allow_pickle: bool = Field(
        default=False, description="read weights that are pickles; no code in them is run"
    )
    force: bool = Field(default=False, description="skip checks against the architecture")
    kvcache_ce_watermark: float = Field(
        default=0.95, gt=0, le=1, description="share of KV pages up to which prompts are admitted"
    )
    enable_overlap_scheduler: bool = Field(
        default=False,
        description="prepare the next batch while one runs (default: on for speech on a GPU)",
    )
    use_legacy_module: bool = Field(
        default=True, description="run layers as written; off: compiled by torch"
    )
    defer_resolve: bool = Field(
        default=False, description="for programs: leave resolving to a later call"
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="the model")
    draft_model: ModelConfig | None = Field(
        default=None, description="a smaller model that drafts tokens: the whole section"
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="sampling")
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig, description="profiling")
    lora: LoRAConfig | None = Field(default=None, description="adapters: the whole section")
    speculative: SpeculativeConfig | None = Field(
        default=None, description="how tokens are drafted: the whole section"
    )
    _resolved: bool = PrivateAttr(default=False)
    _chat_template_text: str | None = PrivateAttr(default=None)
    _plan: RunningPlan | None = PrivateAttr(default=None)

    def __init__(self, **values: Any) -> None:
        if values.get("config_file") is not None:
            from_file = self.values_from_file(values["config_file"], values.get("section_name"))
            values = self.merged(from_file, values)
        super().__init__(**values)
        if not self.defer_resolve:
            self.resolve()

    @field_validator("max_num_steps")
    @classmethod
    def _steps(cls, steps: int) -> int:
        if steps == 0:
            raise ValueError("must be -1 (by device) or at least 1")
        return steps

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
    def is_resolved(self) -> bool:
        """Whether `resolve()` has checked, filled in and frozen this configuration."""
        return self._resolved

    @property
    def runs_alone(self) -> bool:
        """Whether requests share nothing: one at a time, and no prefix cache."""
        return self.max_batch_size == 1 and not self.model.kv_cache.enable_prefix_caching

    @property
    def is_test_mode(self) -> bool:
        """Whether a model without weight files is to run, on random weights."""
        return False

    def resolve(self) -> None:
        """Check the configuration as a whole, fill in what is unset, freeze. Idempotent.

        Raises `ConfigError`, one for each kind of failure, naming the field and its value.
        """
        if self._resolved:
            return
        self.load_architectures()
        refuse_unavailable(self, self.UNAVAILABLE, self.UNAVAILABLE_VALUES)
        try:
            self._chat_template_text = read_chat_template(self.chat_template)
            self.resolve_own()
            resolve_steps(self)
        except OSError as error:  # a path that the system refuses to look at
            raise ConfigError(f"{error.filename} cannot be used: {error.strerror}") from error
        self._resolved = True
        self.freeze()

    def with_batch_size(self, rows: int) -> Self:
        """The same, resolved, with this `max_batch_size` where none is set."""
        if self.max_batch_size is not None:
            return self
        return self.model_copy(update=batch_limits(self, rows))

    def planning_ahead(self) -> Self:
        """The same, resolved, with `enable_overlap_scheduler` on where nobody said whether.

        Not on the CPU, nor where overlap is of no use or refuses what was asked for.
        """
        is_said = "enable_overlap_scheduler" in self.model_fields_set
        has_own_steps = self.max_num_steps not in (1, DEFAULT_STEPS_ON_GPU)
        is_refused = has_own_steps or self.draft_model is not None
        if is_said or self.model.on_cpu or is_refused or self.runs_alone:
            return self
        return self.model_copy(update={"enable_overlap_scheduler": True, "max_num_steps": 1})

    def resolve_own(self) -> None:
        """The part of `resolve` that a subclass adds, before the steps of the core."""

    def load_architectures(self) -> None:
        """Import `custom_architectures` and register what is in them, in this process.

        Resolving does so; whoever gets a resolved configuration from another process calls it.
        """
        load_plugins(self.custom_architectures, self.take_plugin)

    @classmethod
    def take_plugin(cls, entry: object) -> bool:
        """Register one entry of a plug-in's list; False when this class knows no such kind."""
        if isinstance(entry, Architecture):
            register_architecture(entry)
            return True
        return False

    def retrieve_chat_template(self) -> str | None:
        """Text of `chat_template`, None when the tokenizer's own is to be used."""
        return (
            self._chat_template_text if self._resolved else read_chat_template(self.chat_template)
        )

    @property
    def max_active_adapters(self) -> int | None:
        """How many adapters may run at once; None: there are none, so nobody counts."""
        lora = self.lora
        return lora.max_num_loras if lora is not None and lora.enable_lora else None

    @property
    def graph_quantization_encoding(self) -> QuantizationEncoding | None:
        """The weight-only quantisation the model runs with; None for plain number formats."""
        encoding = self.model.quantization_encoding
        return None if encoding is None or encoding.is_plain else encoding

    def configure_session(self, session: Session) -> None:
        """Set a session's profiling, kernel, BLAS and dependent-launch switches from this.

        The launch level is the one in effect: 0 on the CPU. Raises `ConfigError` naming a field.
        """
        level = launch_level(self.pdl_level)
        profiling = self.profiling
        session.gpu_profiling = profiling.gpu_profiling
        if profiling.trace_file is not None:
            steps = (profiling.trace_after, profiling.trace_steps)
            session.trace_steps(profiling.trace_file, *steps)
        session.use_experimental_kernels = switch(
            "use_experimental_kernels", self.use_experimental_kernels
        )
        session.use_vendor_blas = switch("use_vendor_blas", self.use_vendor_blas)
        session.pdl_level = 0 if self.model.on_cpu else level
        session.use_legacy_module = self.use_legacy_module

    def note_plan(self, plan: RunningPlan) -> None:
        """Remember what an engine made of this, for the log. Changes no field."""
        self._plan = plan

    @property
    def running_plan(self) -> RunningPlan | None:
        """What an engine made of this; None before."""
        return self._plan

    def log_basic_config(self) -> None:
        """Log model, task, weights, limits, devices and the memory reserved for the KV cache.

        Raises `ConfigError` when the checkpoint names no architecture, or when no engine has
        planned the memory yet (making one does).
        """
        log_basics(self, self._plan)

    def log_pipeline_info(self) -> None:
        """Log everything of `log_basic_config`, the limits of a batch and the KV cache."""
        log_pipeline(self, self._plan)
