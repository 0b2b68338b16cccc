"""Family name → class, imported on demand, and which family a checkpoint is of."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from llm import CheckpointError
from tts.families.base import Checkpoint, SpeechFamily

_FAMILIES = {
    "embedded": "tts.families.embedded:EmbeddedFamily",
    "orpheus": "tts.families.orpheus:OrpheusFamily",
    "vyvo": "tts.families.orpheus:VyvoFamily",
    "llasa": "tts.families.llasa:LlasaFamily",
    "neutts": "tts.families.neutts:NeuTTSFamily",
}


def supported_families() -> tuple[str, ...]:
    """Registered names, in the order in which they are looked for."""
    return tuple(_FAMILIES)


def find_family(checkpoint: Checkpoint, name: str = "") -> SpeechFamily | None:
    """The checkpoint's family: the named one, the one speech.json names, else the one it looks
    like. None: it only writes text.

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
