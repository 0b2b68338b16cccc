"""Registry of families: classes by name, imported on demand, and detection for a checkpoint."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from llm import CheckpointError
from tts.families.base import Checkpoint, SpeechFamily

_FAMILIES = {
    "embedded": "tts.families.embedded:EmbeddedFamily",
    "csm": "tts.families.csm:CsmFamily",
    "higgs_audio_v2": "tts.families.higgs_audio_v2:HiggsAudioV2Family",
    "qwen3_tts": "tts.families.qwen3_tts:Qwen3TTSFamily",
    "veena": "tts.families.orpheus:VeenaFamily",  # it also matches orpheus
    "maya1": "tts.families.orpheus:Maya1Family",
    "orpheus": "tts.families.orpheus:OrpheusFamily",
    "vyvo": "tts.families.orpheus:VyvoFamily",
    "kani": "tts.families.kani:KaniFamily",
    "outetts": "tts.families.outetts:OuteTTSFamily",
    "llasa": "tts.families.llasa:LlasaFamily",
    "neutts": "tts.families.neutts:NeuTTSFamily",
    "sonant": "tts.families.sonant:SonantFamily",
}


def supported_families() -> tuple[str, ...]:
    """Return the registered names, in the order of detection."""
    return tuple(_FAMILIES)


def find_family(checkpoint: Checkpoint, name: str = "") -> SpeechFamily | None:
    """Return the family of a checkpoint; None for a text-only model.

    The family is `name`, else the one in speech.json, else the first one that matches.

    Raises CheckpointError for an unknown name and for a checkpoint that its family cannot read.
    """
    name = name or str(checkpoint.speech.get("family", ""))
    if name:
        return _load_class(name)(checkpoint)
    for candidate in map(_load_class, _FAMILIES):
        if candidate.matches(checkpoint):
            return candidate(checkpoint)
    return None


def _load_class(name: str) -> type[SpeechFamily]:
    if name not in _FAMILIES:
        raise CheckpointError(
            f"unknown family '{name}'; supported: {', '.join(supported_families())}"
        )
    module_name, class_name = _FAMILIES[name].split(":")
    found: Any = getattr(import_module(module_name), class_name)
    return found
