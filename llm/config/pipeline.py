"""`PipelineConfig`: the configuration of the core.

A configuration is built from keywords (and an optional file), validated field by field (pydantic's
`ValidationError`), then resolved: checked as a whole (`ConfigError`), filled in, and frozen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from pydantic import PrivateAttr

from llm.config.architectures import Architecture, register_architecture
from llm.config.fields import PipelineFields
from llm.config.report import RunningPlan, log_basics, log_pipeline
from llm.config.resolve import (
    DEFAULT_STEPS_ON_GPU,
    batch_limits,
    check_moves_pages,
    launch_level,
    resolve_steps,
)
from llm.config.sections import switch
from llm.config.unsupported import (
    UNSUPPORTED_FIELDS,
    UNSUPPORTED_VALUES,
    refuse_unavailable,
)
from llm.errors import ConfigError


class Session(Protocol):
    """Attributes that `PipelineConfig.configure_session` sets."""

    gpu_profiling: str
    use_experimental_kernels: bool
    use_vendor_blas: bool
    pdl_level: int
    use_legacy_module: bool

    def trace_steps(self, path: Path, after: int, steps: int) -> None: ...


class PipelineConfig(PipelineFields):
    """Configuration of the core. Keyword-only; frozen once resolved (which construction does).

    Explicit keywords take precedence over `config_file`. Values that may stay None after
    `resolve()`: `max_length` (the model's limit), `max_batch_size` and the queue sizes that follow
    from it (set by the memory plan of an engine: see `with_batch_size`), `max_batch_total_tokens`
    (no limit), `chat_template` (the tokenizer's own), `config_file` and `section_name` (no file),
    and the sections of unused features.
    """

    SECTION: ClassVar[str] = "pipeline_config"
    UNAVAILABLE: ClassVar[Mapping[str, str]] = UNSUPPORTED_FIELDS
    UNAVAILABLE_VALUES: ClassVar[Mapping[str, Mapping[str, str]]] = UNSUPPORTED_VALUES

    _resolved: bool = PrivateAttr(default=False)
    _chat_template_text: str | None = PrivateAttr(default=None)
    _plan: RunningPlan | None = PrivateAttr(default=None)
    _common_ids: tuple[int, int] | None = PrivateAttr(default=None)

    def __init__(self, **values: Any) -> None:
        if values.get("config_file") is not None:
            from_file = self.values_from_file(values["config_file"], values.get("section_name"))
            values = self.merged(from_file, values)
        super().__init__(**values)
        if not self.defer_resolve:
            self.resolve()

    @property
    def is_resolved(self) -> bool:
        """Whether `resolve()` has checked, filled in and frozen this configuration."""
        return self._resolved

    def resolve(self) -> None:
        """Check the configuration as a whole, set unset fields, freeze. Idempotent.

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
        except OSError as error:  # for example a path that is too long
            raise ConfigError(f"{error.filename} cannot be used: {error.strerror}") from error
        self._resolved = True
        self.freeze()

    def with_batch_size(self, rows: int) -> Self:
        """Return the resolved configuration with this `max_batch_size` if none is set."""
        if self.max_batch_size is not None:
            return self
        return self.model_copy(update=batch_limits(self, rows))

    def planning_ahead(self) -> Self:
        """Return the resolved configuration with `enable_overlap_scheduler` on, unless it was set.

        Stays off on the CPU, and where overlap has no use or conflicts with other fields.
        """
        is_said = "enable_overlap_scheduler" in self.model_fields_set
        has_own_steps = self.max_num_steps not in (1, DEFAULT_STEPS_ON_GPU)
        is_refused = has_own_steps or self.draft_model is not None
        if is_said or self.model.on_cpu or is_refused or self.runs_alone:
            return self
        return self.model_copy(update={"enable_overlap_scheduler": True, "max_num_steps": 1})

    def with_common_ids(self, ids: tuple[int, int] | None) -> Self:
        """Return the resolved configuration of a model whose requests mostly sample from the ids
        [start, end).
        """
        changed = self.model_copy()
        changed._common_ids = ids
        return changed

    @property
    def common_ids(self) -> tuple[int, int] | None:
        """The range of ids from which most requests sample; None: there is none. On a GPU the head
        of a captured forward may compute the logits of other ids only where a request needs them,
        see `FusedHead`.
        """
        return self._common_ids

    def of_replica(self, number: int) -> Self:
        """Return the resolved configuration of one replica, by its number from 0.

        It has a share of the devices, and of the memory of a device that all share.
        """
        model, count = self.model, self.model.data_parallel_degree
        devices = model.devices_of_replica(number)
        cache = model.kv_cache
        if model.on_cpu or len(model.device_specs) == 1:
            share = cache.device_memory_utilization / count
            cache = cache.model_copy(update={"device_memory_utilization": share})
        own = {"data_parallel_degree": 1, "device_specs": devices, "kv_cache": cache}
        draft = self.draft_model
        if draft is not None:
            draft = draft.model_copy(update={"device_specs": devices})
        return self.model_copy(update={"model": model.model_copy(update=own), "draft_model": draft})

    def resolve_own(self) -> None:
        """Run the part of `resolve` that a subclass adds, before the steps of the core."""

    def check_moves_pages(self, name: str) -> None:
        """Raise `ConfigError` for an engine that cannot move the pages of prompts, which the field
        `name` asks for.
        """
        check_moves_pages(self, name)

    def load_architectures(self) -> None:
        """Import `custom_architectures` and register their entries in this process.

        Resolving does so; a process that receives a resolved configuration must call it.
        """
        load_plugins(self.custom_architectures, self.take_plugin)

    @classmethod
    def take_plugin(cls, entry: object) -> bool:
        """Register one entry of a plug-in's list; return False for an unknown kind of entry."""
        if isinstance(entry, Architecture):
            register_architecture(entry)
            return True
        return False

    def retrieve_chat_template(self) -> str | None:
        """Return the text of `chat_template`; None when the tokenizer's own is used."""
        return (
            self._chat_template_text if self._resolved else read_chat_template(self.chat_template)
        )

    def configure_session(self, session: Session) -> None:
        """Set a session's profiling, kernel, BLAS and dependent-launch switches.

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
        """Store the plan of a running engine, for the log. Changes no field."""
        self._plan = plan

    @property
    def running_plan(self) -> RunningPlan | None:
        """The plan of a running engine; None before."""
        return self._plan

    def log_basic_config(self) -> None:
        """Log model, task, weights, limits, devices and the memory reserved for the KV cache.

        Raises `ConfigError` when the checkpoint names no architecture, or when no engine has
        planned the memory yet (creating one does).
        """
        log_basics(self, self._plan)

    def log_pipeline_info(self) -> None:
        """Log everything of `log_basic_config`, the limits of a batch and the KV cache."""
        log_pipeline(self, self._plan)


def read_chat_template(chat_template: Path | None) -> str | None:
    """Return the template's text; None without a file.

    `~` is expanded, and a relative path starts at the working directory. Raises `ConfigError`
    naming the path when it is not a file, or cannot be read as UTF-8.
    """
    if chat_template is None:
        return None
    path = chat_template.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"chat_template={path} is not a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read chat_template={path}: {error}") from error
    return _template_in(text)


def _template_in(text: str) -> str:
    """Return the value of `chat_template` when the text is a JSON object with that key; else the
    text.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    template = values.get("chat_template") if isinstance(values, dict) else None
    return template if isinstance(template, str) else text


PLUGIN_LIST = "ARCHITECTURES"  # list of entries in a module that `custom_architectures` names


def load_plugins(names: list[str], take: Callable[[object], bool]) -> None:
    """Import each module and pass its entries to `take`, which returns whether it accepts them.

    Raises `ConfigError` naming the module and the problem.
    """
    for name in names:
        for entry in _entries(name):
            if not take(entry):
                raise ConfigError(f"custom_architectures={name}: {entry!r} is no architecture")


def _entries(name: str) -> list[object]:
    folder, found, module = name.rpartition(":")
    if ":" in folder or not module or (found and not folder):
        raise ConfigError(f"custom_architectures={name} must be module or folder:module")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        entries = getattr(import_module(module), PLUGIN_LIST, None)
    except Exception as error:  # external code: report any error with the name of the module
        raise ConfigError(f"custom_architectures={name}: cannot import it: {error!r}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"custom_architectures={name}: it has no list {PLUGIN_LIST}, or an empty one"
        )
    return entries


_default: list[PipelineConfig] = []


def set_default_config(config: PipelineConfig | None) -> None:
    """Set the configuration of a `ModelRunner` that is given none; None removes it."""
    _default[:] = [] if config is None else [config]


def default_config() -> PipelineConfig:
    """Return the process's default configuration. Raises `RuntimeError` when there is none."""
    if not _default:
        raise RuntimeError("give the runner a configuration, or call set_default_config before")
    return _default[0]
