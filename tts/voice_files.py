"""The voices that a checkpoint brings: its voices.json, or recordings beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm import CheckpointError
from tts.checkpoint import read_json
from tts.voice import VOICE_ID, Voice, VoiceClip, VoicePrompt, VoiceSet

logger = logging.getLogger(__name__)

SAMPLE_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
_BUILTIN_KEYS = frozenset(
    {"name", "display_name", "language_codes", "control_token", "speaker"}
    | {"codes", "audio", "transcript"}
)


def load_voices(path: Path) -> VoiceSet:
    """The voices of a checkpoint's voices.json."""
    values = read_json(path)
    entries = values.get("voices")
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{path} lists no voices")
    voices = tuple(_builtin_voice(path, entry) for entry in entries)
    if len({voice.name for voice in voices}) != len(voices):
        raise CheckpointError(f"{path}: two voices have the same name")
    return VoiceSet(voices, str(values.get("default", voices[0].name)))


def sample_voices(folder: Path) -> VoiceSet:
    """A voice for each recording in a folder that has its transcript beside it: dave.wav, dave.txt.

    The first by name is the default. None are found where there is no such folder.
    """
    voices = []
    for audio in sorted(path for path in folder.glob("*") if path.suffix in SAMPLE_SUFFIXES):
        text, name = audio.with_suffix(".txt"), audio.stem.lower()
        if not text.is_file() or not VOICE_ID.fullmatch(name):
            logger.warning("sample %s is not used: it needs a voice's name and a .txt", audio)
            continue
        clip = VoiceClip(audio, text.read_text(encoding="utf-8").strip())
        voices.append(Voice(name, name.capitalize(), clip=clip, is_builtin=True))
    return VoiceSet(tuple(voices), voices[0].name if voices else "")


def _builtin_voice(path: Path, entry: Any) -> Voice:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise CheckpointError(f"{path}: every voice needs a name")
    name, unknown = entry["name"], sorted(entry.keys() - _BUILTIN_KEYS)
    if not VOICE_ID.fullmatch(name):
        raise CheckpointError(f"{path}: '{name}' is no voice name")
    if unknown:
        raise CheckpointError(f"{path}: voice '{name}' has unknown keys: {', '.join(unknown)}")
    return Voice(
        name=name,
        display_name=str(entry.get("display_name", name)),
        language_codes=tuple(entry.get("language_codes", ())),
        control_token=str(entry.get("control_token", "")),
        speaker=str(entry.get("speaker", "")),
        prompt=_builtin_prompt(path, entry),
        clip=_builtin_clip(path, entry),
        is_builtin=True,
    )


def _builtin_prompt(path: Path, entry: Mapping[str, Any]) -> VoicePrompt | None:
    if "codes" not in entry:
        return None
    return VoicePrompt(whole_codes(path, entry["codes"]), str(entry.get("transcript", "")))


def _builtin_clip(path: Path, entry: Mapping[str, Any]) -> VoiceClip | None:
    """`audio` names a file beside voices.json; nothing outside that folder is read."""
    if "audio" not in entry:
        return None
    audio, transcript = path.parent / str(entry["audio"]), str(entry.get("transcript", ""))
    if not audio.resolve().is_relative_to(path.parent.resolve()) or not audio.is_file():
        raise CheckpointError(f"{path}: there is no {entry['audio']} beside it")
    if not transcript:
        raise CheckpointError(f"{path}: voice '{entry['name']}' has audio but no transcript")
    return VoiceClip(audio, transcript)


def whole_codes(path: Path, values: Any) -> tuple[int, ...]:
    """Codes from JSON; CheckpointError names the file when they are none."""
    codes = tuple(values)
    if not all(type(code) is int and code >= 0 for code in codes) or not codes:
        raise CheckpointError(f"{path}: codes must be whole numbers")
    return codes
