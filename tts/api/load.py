"""Loads a model for one user's own program: `tts.load`, and the command line without a server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llm import ConfigError
from tts.api.running import RunningService
from tts.api.voice import LoadedVoice
from tts.config.defaults import complete_values
from tts.config.pipeline import AudioGenerationConfig, describe_error, load_config
from tts.config.server import ServerConfig
from tts.factory import Service, create_service

UNLIMITED = 2**31 - 1
MAX_REQUESTS = 8  # sentences that are spoken at once, unless `max_batch_size` says otherwise

LIMITS = ServerConfig(
    max_text_characters=UNLIMITED,
    max_stream_characters=UNLIMITED,
    max_prompt_audio_bytes=16 * 2**20,
    max_audio_duration_s=float(UNLIMITED),
    idle_timeout_s=float(UNLIMITED),
    slow_reader_timeout_s=float(UNLIMITED),
)
"""Limits of a user's own program: texts of any length, read at any pace."""


def load(model: str | Path = "", /, *, revision: str = "", **options: Any) -> LoadedVoice:
    """Load a voice into this process and return it, ready to speak.

    `model` is a checkpoint's folder or a name on the Hugging Face hub; left out, it is the
    built-in voice, of English and Spanish. `revision` is the hub's branch, tag or commit. `options`
    are the fields of `AudioGenerationConfig`, named as the flags of `tts.serve`
    (`family="orpheus"`, `max_batch_size=32`); a section is a dictionary, as in a configuration file
    (`model={"device_specs": ["cpu"]}`). `lexicon` is a file of pronunciations, or several.
    `SONANT_...` variables and `config_file=` count, too.

    Blocks until the model is loaded. Raises `ConfigError` for an option that does not exist or has
    a wrong value, `CheckpointError` for a checkpoint that cannot be used, `CapacityError` when it
    does not fit into memory, and `PreconditionError` for a model that does not speak.
    """
    return LoadedVoice(RunningService(load_service(_values(str(model), revision, options))))


def load_service(values: Mapping[str, Any]) -> Service:
    """Return the service of these configuration values, for one user instead of hundreds.

    Raises as `load` does, `ConfigError` and not pydantic's error for a field with a wrong value.
    """
    try:
        return create_service(load_config(AudioGenerationConfig, values, base=_complete), LIMITS)
    except ValidationError as error:
        raise ConfigError(describe_error(error)) from error


def _complete(values: dict[str, Any]) -> dict[str, Any]:
    """Complete values as for a server, with a batch for one user instead of hundreds."""
    return AudioGenerationConfig.merged({"max_batch_size": MAX_REQUESTS}, complete_values(values))


def _values(model: str, revision: str, options: Mapping[str, Any]) -> dict[str, Any]:
    named = {"model_path": model, "huggingface_revision": revision}
    section = {name: value for name, value in named.items() if value}
    return AudioGenerationConfig.merged(options, {"model": section} if section else {})
