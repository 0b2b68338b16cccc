"""From the values that a user gave to those of a configuration whose model is on this machine.

--model owner/name ─▶ find_checkpoint ─▶ folder ─▶ its default values, beneath what was given
                                           └─ a codec published on its own ─▶ its folder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tts.config import AUTO_DECODER, AudioGenerationConfig, hub_options
from tts.factory import default_values
from tts.hub import find_checkpoint, is_hub_name, split_revision

if TYPE_CHECKING:
    from tts.hub import HubOptions

ADAPTER_CONFIG = "adapter_config.json"


def complete_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """All values: the given ones, models and codecs by folder, and the model's defaults.

    Downloads what is named by its hub name and not here yet. Raises pydantic's `ValidationError`,
    `ConfigError` and `CheckpointError`.
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
    """The given values with the model's folder and its defaults beneath; no model: the embedded."""
    name = probe.model.model_path
    if not name:
        return probe.merged(default_values(), given)
    # The codec first: it is the smaller one, and what it lacks is said before gigabytes come.
    codec = _codec(probe, options)
    folder = find_checkpoint(name, options)
    found = {"model": {"model_path": str(folder)}}
    named = {"model": {"served_model_name": name}} if is_hub_name(name) else {}
    return probe.merged(default_values(folder), named, given, found, codec)


def _adapter(entry: str, options: HubOptions) -> str:
    """NAME=FOLDER of an entry; an adapter of the hub is called as its repository."""
    given, _, path = entry.rpartition("=")
    path, revision = split_revision(path)
    if not is_hub_name(path):
        return entry
    options = replace(options, revision=revision, config_file=ADAPTER_CONFIG)
    return f"{given or path.partition('/')[2]}={find_checkpoint(path, options)}"


def _codec(probe: AudioGenerationConfig, options: HubOptions) -> dict[str, Any]:
    """The folder of a codec that has a repository of its own: the one that was named, or the one
    of the speech family when the model itself came from the hub without a codec.
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
