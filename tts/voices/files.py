"""Built-in voices of a checkpoint, from its voices.json or its folder of recordings."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm import CheckpointError
from tts.checkpoint.files import read_json
from tts.text.lexicon.entries import MAX_PHRASE_CHARACTERS, Alphabet, Pronunciation
from tts.voices.types import VOICE_ID, Voice, VoiceClip, VoicePrompt, VoiceSet

logger = logging.getLogger(__name__)

SAMPLE_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
SAMPLE_CODES = ".pt"
_BUILTIN_KEYS = frozenset(
    {"name", "display_name", "language_codes", "control_token", "speaker"}
    | {"codes", "audio", "transcript", "pronunciations"}
)
_PRONUNCIATION_KEYS = frozenset({"phrase", "pronunciation", "alphabet"})


def load_voices(path: Path) -> VoiceSet:
    """Return the voices of a checkpoint's voices.json. Raises CheckpointError."""
    values = read_json(path)
    entries = values.get("voices")
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{path} lists no voices")
    voices = tuple(_builtin_voice(path, entry) for entry in entries)
    if len({voice.name for voice in voices}) != len(voices):
        raise CheckpointError(f"{path}: two voices have the same name")
    default = str(values.get("default", voices[0].name))
    if default not in {voice.name for voice in voices}:
        raise CheckpointError(f"{path}: the default voice '{default}' is not among the voices")
    return VoiceSet(voices, default)


def sample_voices(folder: Path, *, allow_pickle: bool = False) -> VoiceSet:
    """Return a voice for each recording with a transcript in a folder: dave.wav and dave.txt.

    A tensor of codes (dave.pt, as `torch.save` writes it) can replace a recording; it is a pickle
    and is read only with `allow_pickle`. The first voice by name is the default. A missing folder
    has no voices.
    """
    voices = [
        voice
        for sample in _samples(folder)
        if (voice := _sample_voice(sample, allow_pickle=allow_pickle)) is not None
    ]
    return VoiceSet(tuple(voices), voices[0].name if voices else "")


def _samples(folder: Path) -> list[Path]:
    """Return recordings, and codes that have no recording, sorted by name."""
    files = sorted(folder.glob("*"))
    recorded = [path for path in files if path.suffix in SAMPLE_SUFFIXES]
    names = {path.stem for path in recorded}
    codes = [path for path in files if path.suffix == SAMPLE_CODES and path.stem not in names]
    return sorted(recorded + codes, key=lambda path: path.stem)


def _sample_voice(sample: Path, *, allow_pickle: bool) -> Voice | None:
    text, name = sample.with_suffix(".txt"), sample.stem.lower()
    if not text.is_file() or not VOICE_ID.fullmatch(name):
        logger.warning("sample %s is not used: it needs a voice's name and a .txt", sample)
        return None
    transcript = text.read_text(encoding="utf-8").strip()
    voice = Voice(name, name.capitalize(), is_builtin=True)
    if sample.suffix != SAMPLE_CODES:
        return replace(voice, clip=VoiceClip(sample, transcript))
    if not allow_pickle:
        logger.warning(
            "sample %s is not used: it is a pickle; add a recording of that name, or allow it with "
            "--allow-pickle",
            sample,
        )
        return None
    return replace(voice, prompt=VoicePrompt(_pickled_codes(sample), transcript))


def _pickled_codes(path: Path) -> tuple[int, ...]:
    """Return the integers of a saved tensor; anything else in the pickle is refused, not run."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        values = torch.as_tensor(found).flatten().tolist()
    except (OSError, pickle.UnpicklingError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"cannot read the codes of {path}: {error}") from error
    return whole_codes(path, values)


def _builtin_voice(path: Path, entry: Any) -> Voice:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise CheckpointError(f"{path}: every voice needs a name")
    name, unknown = entry["name"], sorted(entry.keys() - _BUILTIN_KEYS)
    if not VOICE_ID.fullmatch(name):
        raise CheckpointError(f"{path}: '{name}' is no voice name")
    if unknown:
        raise CheckpointError(f"{path}: voice '{name}' has unknown keys: {', '.join(unknown)}")
    voice = Voice(
        name=name,
        display_name=_text(path, entry, "display_name") or name,
        language_codes=_language_codes(path, entry),
        control_token=_text(path, entry, "control_token"),
        speaker=_text(path, entry, "speaker"),
        prompt=_builtin_prompt(path, entry),
        clip=_builtin_clip(path, entry),
        is_builtin=True,
        pronunciations=read_pronunciations(path, entry.get("pronunciations", [])),
    )
    return checked_texts(path, voice)


def _language_codes(path: Path, entry: Mapping[str, Any]) -> tuple[str, ...]:
    codes = entry.get("language_codes", [])
    if not isinstance(codes, list) or not all(isinstance(code, str) for code in codes):
        raise CheckpointError(
            f"{path}: language_codes of voice '{entry['name']}' must be a list of text"
        )
    return tuple(codes)


def _text(path: Path, entry: Mapping[str, Any], key: str) -> str:
    """Return a text of an entry; "" if it is absent."""
    value = entry.get(key, "")
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: {key} of voice '{entry['name']}' must be text")
    return value


def _builtin_prompt(path: Path, entry: Mapping[str, Any]) -> VoicePrompt | None:
    if "codes" not in entry:
        return None
    return VoicePrompt(whole_codes(path, entry["codes"]), _text(path, entry, "transcript"))


def _builtin_clip(path: Path, entry: Mapping[str, Any]) -> VoiceClip | None:
    """Return the clip of an entry; `audio` must name a file in the folder of voices.json."""
    if "audio" not in entry:
        return None
    audio = path.parent / _text(path, entry, "audio")
    transcript = _text(path, entry, "transcript")
    if not _is_in_folder(path, audio):
        raise CheckpointError(f"{path}: there is no {entry['audio']} in its folder")
    if not transcript:
        raise CheckpointError(f"{path}: voice '{entry['name']}' has audio but no transcript")
    return VoiceClip(audio, transcript)


def _is_in_folder(path: Path, other: Path) -> bool:
    """Return whether a file exists in the folder of `path`, or below it."""
    try:
        return other.resolve().is_relative_to(path.parent.resolve()) and other.is_file()
    except (OSError, ValueError):  # an invalid file name
        return False


def checked_texts(path: Path, voice: Voice) -> Voice:
    """Return the voice; raise CheckpointError for a text with a lone surrogate (valid in JSON)."""
    try:
        "".join(voice.texts).encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{path}: voice '{voice.name}' has text that is not Unicode"
        ) from None
    return voice


def read_pronunciations(path: Path, values: Any) -> tuple[Pronunciation, ...]:
    """Return pronunciations from JSON. Raises CheckpointError, which names the file and the entry.

    Each is an object with `phrase`, `pronunciation` and, if that is not in letters, `alphabet`.
    """
    if not isinstance(values, list):
        raise CheckpointError(f"{path}: pronunciations must be a list of objects")
    return tuple(_pronunciation(path, number, value) for number, value in enumerate(values))


def _pronunciation(path: Path, number: int, value: Any) -> Pronunciation:
    name = f"{path}: pronunciations[{number}]"
    if not isinstance(value, dict) or not {"phrase", "pronunciation"} <= value.keys():
        raise CheckpointError(f"{name} must be an object with phrase and pronunciation")
    if value.keys() - _PRONUNCIATION_KEYS or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(f"{name} may have the texts {', '.join(sorted(_PRONUNCIATION_KEYS))}")
    try:
        alphabet = Alphabet(value.get("alphabet", Alphabet.LETTERS.value))
    except ValueError:
        known = ", ".join(known.value for known in Alphabet)
        raise CheckpointError(f"{name}: alphabet must be one of {known}") from None
    phrase, spoken = value["phrase"], value["pronunciation"]
    if not all(0 < len(text) <= MAX_PHRASE_CHARACTERS for text in (phrase, spoken)):
        most = MAX_PHRASE_CHARACTERS
        raise CheckpointError(f"{name}: a text must have 1 to {most} characters")
    return Pronunciation(phrase, spoken, alphabet)


def pronunciations_json(entries: Iterable[Pronunciation]) -> list[dict[str, str]]:
    """Return pronunciations as `read_pronunciations` reads them."""
    return [
        {"phrase": said.phrase, "pronunciation": said.spoken, "alphabet": said.alphabet.value}
        for said in entries
    ]


def whole_codes(path: Path, values: Any) -> tuple[int, ...]:
    """Return codes from JSON. Raises CheckpointError, which names the file, for other values."""
    is_list = isinstance(values, list | tuple) and values
    if not is_list or not all(type(code) is int and 0 <= code < 2**31 for code in values):
        raise CheckpointError(f"{path}: codes must be whole numbers, in a list")
    return tuple(values)
