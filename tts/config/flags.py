"""A server's configuration fields as command-line flags, in groups by subject.

A field `model.kv_cache.num_pages` becomes `--model.kv-cache.num-pages`. Only flags that were given
appear in the parsed arguments, as text: the configuration class checks them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tts.config.sources import inner_type, is_section, walk_fields

SHORT_FLAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--model": ("model.model_path", "folder or hub OWNER/NAME (default: built in)"),
        "--revision": ("model.huggingface_revision", "branch, tag or commit of the model"),
        "--replicas": ("model.data_parallel_degree", "as --model.data-parallel-degree"),
    }
)
"""Flag -> the field that it sets, and its help."""

FIRST: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": ("--model", "model.device_specs", "max_batch_size"),
        "server": ("host", "port", "front_ends", "max_concurrent_requests", "voice_folder"),
        "access": ("auth_token", "tls_cert", "tls_key"),
        "configuration and log": ("config_file", "log_level"),
    }
)
"""Title -> what `--help` shows, one line each."""

GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "model": (
            "--model",
            "--revision",
            "model.model_path",
            "model.huggingface_revision",
            "offline",
            "family",
            "model.served_model_name",
            "text_model",
            "text_model_config",
            "speech_server",
            "model.weight_path",
            "allow_pickle",
            "audio_decoder",
            "audio_decoder_weights",
            "audio_decoder_config",
            "watermark",
            "lexicon",
            "chat_template",
            "custom_architectures",
            "run_model_test_mode",
            "force",
        ),
        "device": (
            "model.device_specs",
            "--replicas",
            "model.data_parallel_degree",
            "ep_size",
            "prefill_devices",
            "pipeline_role",
            "prefill_endpoints",
            "model.quantization_encoding",
            "model.rope_type",
            "model.attention_backend",
            "model.batch_invariant",
            "model.disable_cuda_graph",
            "use_legacy_module",
            "use_vendor_blas",
            "use_experimental_kernels",
            "pdl_level",
        ),
        "batches": (
            "max_batch_size",
            "max_length",
            "max_batch_input_tokens",
            "max_batch_total_tokens",
            "max_queue_size_tg",
            "min_batch_size_tg",
            "max_num_steps",
            "enable_chunked_prefill",
            "enable_in_flight_batching",
            "enable_prioritize_first_decode",
            "enable_overlap_scheduler",
            "ce_delay_ms",
            "pace_streams",
            "kvcache_ce_watermark",
            "execute_empty_batches",
        ),
        "KV cache": ("model.kv_cache.",),
        "audio blocks": (
            "chunk_size",
            "buffer",
            "block_causal",
            "prepend_prompt_speech_tokens",
            "prepend_prompt_speech_tokens_causal",
        ),
        "sampling and embeddings": ("sampling.", "enable_echo", "pool_embeddings"),
        "adapters": ("lora", "lora."),
        "draft model": ("draft_model", "draft_model.", "speculative", "speculative."),
        "listening": (
            "host",
            "port",
            "http_port",
            "http_cors_origins",
            "wyoming_port",
            "wyoming_host",
            "front_ends",
            "max_connection_age_s",
            "max_message_bytes",
            "enable_reflection",
            "zmq_endpoint_base",
        ),
        "access": (
            "auth_token",
            "admin_token",
            "tls_cert",
            "tls_key",
            "tls_client_ca",
            "speech_server_token",
            "speech_server_tls",
            "speech_server_ca",
            "wyoming_without_token",
        ),
        "requests": (
            "max_concurrent_requests",
            "max_queued_requests",
            "max_streams_per_client",
            "max_text_characters",
            "max_fragment_characters",
            "max_stream_characters",
            "max_audio_duration_s",
        ),
        "voices": (
            "voice_folder",
            "max_voices",
            "max_voice_bytes",
            "max_prompt_audio_bytes",
            "min_prompt_duration_s",
            "max_prompt_duration_s",
        ),
        "timeouts and restarts": (
            "receive_timeout_s",
            "idle_timeout_s",
            "slow_reader_timeout_s",
            "step_timeout_s",
            "load_timeout_s",
            "max_restarts",
            "unload_after_s",
            "drain_delay_s",
            "drain_grace_s",
        ),
        "logs, metrics and traces": (
            "log_level",
            "log_format",
            "log_user_text",
            "trace_requests",
            "prometheus_metrics_mode",
            "metrics_host",
            "metrics_port",
            "profiling.",
        ),
        "configuration": ("config_file", "section_name", "defer_resolve"),
    }
)
"""Title -> what `--help-all` shows: short flags, fields, and sections (`section.`)."""

METAVARS: Mapping[str, str] = MappingProxyType(
    {
        "model_path": "NAME",
        "text_model": "NAME",
        "speech_server": "HOST:PORT",
        "chunk_size": "N,N,...",
        "s": "SECONDS",
        "ms": "MS",
        "bytes": "BYTES",
        "gb": "GIB",
        "host": "ADDRESS",
        "base": "URI",
        "specs": "DEVICE",
        "devices": "DEVICE",
        "endpoints": "URI",
        "token": "TOKEN",
        "revision": "REVISION",
        "file": "PATH",
        "weights": "PATH",
        "level": "LEVEL",
        "lexicon": "FILE",
        "blas": "BOOL",
        "kernels": "BOOL",
        "name": "NAME",
        "decoder": "NAME",
        "family": "NAME",
    }
)
"""Last words of a field's name -> the name of its value; for other fields the type says it."""

NO_SHORT_FLAGS: Mapping[str, tuple[str, str]] = MappingProxyType({})
PAGES_OF_DRAFT = "draft_model.kv_cache."  # a draft shares the model's pages, save for their format
OWN_OF_DRAFT = "draft_model.kv_cache.kv_cache_format"


def add_config_flags(
    parser: argparse.ArgumentParser,
    *model_classes: type[BaseModel],
    short_flags: Mapping[str, tuple[str, str]] = NO_SHORT_FLAGS,
    show_all: bool = True,
) -> None:
    """Add a flag for every field of configuration classes, in groups by subject.

    `short_flags`: see `SHORT_FLAGS`. Without `show_all` the help shows `FIRST`; with
    it all but the fields whose values are refused. All flags are accepted in any case.
    """
    fields = {n: (cls, field) for cls in model_classes for n, field in walk_fields(cls)}
    shown: dict[str, argparse._ArgumentGroup] = {}
    for title, entries in (GROUPS if show_all else FIRST).items():
        group = parser.add_argument_group(title)
        shown |= dict.fromkeys(_expanded(entries, fields), group)
    for name in dict.fromkeys((*shown, *short_flags, *fields)):
        dest, text = short_flags.get(name, (name, ""))
        if dest not in fields:  # of another configuration
            continue
        model_class, field = fields[dest]
        if name not in shown or is_refused(dest, field, model_class):
            text = argparse.SUPPRESS
        flag = "--" + name.removeprefix("--").replace("_", "-")
        text = text or help_text(dest, field, model_class)
        _add_flag(shown.get(name, parser), flag, (dest, field), text)


def _expanded(entries: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    for entry in entries:
        if entry.endswith("."):
            yield from (name for name in names if name.startswith(entry))
        else:
            yield entry


def _add_flag(
    group: argparse._ActionsContainer, flag: str, target: tuple[str, FieldInfo], text: str
) -> None:
    name, field = target
    shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    shared["help"] = text.replace("%", "%%")
    if inner_type(field.annotation) is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **shared)
    else:
        action = "append" if get_origin(inner_type(field.annotation)) is list else "store"
        group.add_argument(flag, action=action, metavar=_metavar(name, field), **shared)


def is_refused(name: str, field: FieldInfo, model_class: type[BaseModel]) -> bool:
    """Whether every value of a field but its default is refused."""
    if name.startswith(PAGES_OF_DRAFT):
        return name != OWN_OF_DRAFT
    known = name.removeprefix("draft_")  # a draft model lacks what a model lacks
    if {name, known} & set(getattr(model_class, "UNAVAILABLE", ())):
        return True
    return bool(choices_of(field)) and len(supported_choices(name, field, model_class)) == 1


def help_text(name: str, field: FieldInfo, model_class: type[BaseModel]) -> str:
    """Return the field's description, its choices, and its default where there is one."""
    if name.startswith("draft_model."):
        return f"as --model.{name.removeprefix('draft_model.').replace('_', '-')}"
    text = field.description or ""
    choices = supported_choices(name, field, model_class)
    if not all(choice in text for choice in choices):
        text, *default = text.partition(" (default: ")
        text = "".join((text, ": ", ", ".join(choices[:-1]), " or ", choices[-1], *default))
    return text if "(default: " in text else text + _default(field)


def supported_choices(name: str, field: FieldInfo, model_class: type[BaseModel]) -> list[str]:
    """Return the choices of a field without those that are refused; [] for a free value."""
    refused = getattr(model_class, "UNAVAILABLE_VALUES", {}).get(name, {})
    return [value for value in choices_of(field) if value not in refused]


def choices_of(field: FieldInfo) -> list[str]:
    """Return the values of an enumeration or literal field; [] for a free value."""
    kind = inner_type(field.annotation)
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return []


def _default(field: FieldInfo) -> str:
    value = getattr(field.default, "value", field.default)
    if inner_type(field.annotation) is bool:
        return f" (default: {'on' if value else 'off'})"
    has_none = field.default_factory is not None or value in (None, "", PydanticUndefined)
    return "" if has_none else f" (default: {value})"


def _metavar(name: str, field: FieldInfo) -> str:
    kind = inner_type(field.annotation)
    if is_section(kind) or get_origin(kind) is dict:
        return "JSON"
    words = "_" + name.rpartition(".")[2]
    for end, metavar in METAVARS.items():
        if words.endswith("_" + end):
            return metavar
    if get_origin(kind) is list:
        return "A,B,..."
    if choices_of(field):
        return "CHOICE"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "VALUE")
