"""Completion of the given values: models and codecs as local folders, and defaults beneath.

--model owner/name ─▶ find_checkpoint ─▶ folder ─▶ its default values, beneath what was given
                                           └─ a codec published on its own ─▶ its folder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tts.checkpoint.gguf import is_gguf
from tts.checkpoint.hub import find_checkpoint, is_hub_name, split_revision
from tts.config.pipeline import AUTO_DECODER, AudioGenerationConfig, hub_options

if TYPE_CHECKING:
    from tts.checkpoint.hub import HubOptions

ADAPTER_CONFIG = "adapter_config.json"
VOICE_TOKENS = 32  # of a built-in voice: one page, which later requests find in the prefix cache


def embedded_folder() -> Path:
    """Return the folder of the checkpoint that is shipped with the package."""
    return Path(str(resources.files("tts"))) / "embedded"


def default_values(model_path: str | Path = "") -> dict[str, Any]:
    """Return the default values for a checkpoint folder; without one, for the built-in voice.

    They are the lowest layer of `load_config`: flags, files and the environment override them. The
    built-in voice runs on the CPU by default: it loads faster there, and one stream is as fast.
    """
    if not str(model_path):
        embedded: dict[str, Any] = {
            "model_path": str(embedded_folder()),
            "device_specs": ["cpu"],
            "kv_cache": {"kv_cache_page_size": VOICE_TOKENS},
        }
        return {"audio_decoder": AUTO_DECODER, "model": embedded}
    return {"audio_decoder": AUTO_DECODER, "model": {"model_path": str(model_path)}}


def complete_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given values with local folders for models and codecs, and with defaults.

    Models and codecs given by hub name are downloaded first, unless they are cached. Raises
    pydantic's `ValidationError`, `ConfigError` and `CheckpointError`.
    """
    merged = AudioGenerationConfig.merged
    probe = AudioGenerationConfig(
        **merged({"audio_decoder": AUTO_DECODER}, given, {"defer_resolve": True})
    )
    options = hub_options(probe)
    values = _model_values(probe, options, given)
    if probe.draft_model is not None and probe.draft_model.model_path:
        revision = probe.draft_model.huggingface_revision
        draft = find_checkpoint(probe.draft_model.model_path, replace(options, revision=revision))
        values = merged(values, {"draft_model": {"model_path": str(draft)}})
    if probe.lora is not None and probe.lora.lora_paths:
        adapters = [_adapter(entry, options) for entry in probe.lora.lora_paths]
        values = merged(values, {"lora": {"lora_paths": adapters}})
    return values


def _model_values(
    probe: AudioGenerationConfig, options: HubOptions, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the given values above the defaults of their model, or of the built-in voice."""
    name = probe.model.model_path
    if not name:
        return probe.merged(default_values(), given)
    # The codec first: it is smaller, so its errors appear before gigabytes are downloaded.
    codec = _codec(probe, options)
    folder = find_checkpoint(name, options)
    found = {"model": {"model_path": str(folder)}}
    served = name if is_hub_name(name) else Path(name).stem if is_gguf(name) else ""
    named = {"model": {"served_model_name": served}} if served else {}
    return probe.merged(default_values(folder), named, given, found, codec)


def _adapter(entry: str, options: HubOptions) -> str:
    """Return NAME=FOLDER for an entry; an adapter of the hub is named after its repository."""
    given, _, path = entry.rpartition("=")
    path, revision = split_revision(path)
    if not is_hub_name(path):
        return entry
    options = replace(options, revision=revision, config_file=ADAPTER_CONFIG)
    return f"{given or path.partition('/')[2]}={find_checkpoint(path, options)}"


def _codec(probe: AudioGenerationConfig, options: HubOptions) -> dict[str, Any]:
    """Return values with the folder of a codec that has its own repository; {} without one.

    It is the given codec, or that of the speech family if a model of the hub has no codec.
    """
    name, model = probe.audio_decoder, probe.model.model_path
    if name == AUTO_DECODER and is_hub_name(model):
        described = find_checkpoint(model, replace(options, fetches_weights=False))
        name = _published_codec(described, probe.family)
    name, revision = split_revision(name)
    if not is_hub_name(name):
        return {}
    return {"audio_decoder": str(find_checkpoint(name, replace(options, revision=revision)))}


def _published_codec(folder: Path, family_name: str) -> str:
    from tts.families.base import Checkpoint
    from tts.families.registry import find_family

    family = find_family(Checkpoint(folder), family_name)
    if family is None or (folder / family.traits.codec).is_dir():
        return ""
    return family.traits.codec_repository
