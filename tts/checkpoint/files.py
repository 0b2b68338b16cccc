"""Checked speech.json and generation_config.json of a checkpoint folder.

Files are read as data: no weights are loaded and no code from the folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llm import CheckpointError, CodeSampling, RequestError, SamplingParams

SPEECH_FILE = "speech.json"
GENERATION_FILE = "generation_config.json"
MAX_NAME_BYTES = 255  # of a file in a folder; longer ones are errors of the operating system

_SAMPLING_KEYS = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "penalty_window": int,
}
_SAMPLING_SWITCHES = ("do_sample", "dosample")


@dataclass(frozen=True, slots=True)
class SpeechDescription:
    """The embedded family's speech.json. Token names are those of tokenizer.json.

    Other families know their tokens; their speech.json, if there is one, holds `family` and the
    values that differ from it.
    """

    family: str
    codec: str  # folder next to the language model, or a registered codec's name
    voices: str  # file name
    code_token: str  # with {} for the code
    start_of_speech: str
    end_of_speech: str
    any_voice: str  # opens a turn in a voice that has no token of its own
    max_characters: int  # longest text of one language-model call
    max_codes: int  # longest speech of one

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> SpeechDescription:
        """Create it from the checked values of the file at `path`."""
        known = [field.name for field in fields(cls)]
        missing = sorted(set(known) - values.keys())
        if missing:
            raise CheckpointError(f"{path} lacks: {', '.join(missing)}")
        if "{}" not in values["code_token"]:
            raise CheckpointError(f"{path}: code_token must hold {{}} where the code goes")
        return cls(**{name: values[name] for name in known})


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError with the file and its problem."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: it is nested too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def load_speech_file(folder: Path) -> dict[str, Any]:
    """Read the folder's speech.json and check its values; {} if there is none."""
    path = folder / SPEECH_FILE
    if not path.is_file():
        return {}
    values = read_json(path)
    for field in fields(SpeechDescription):
        if field.name in values:
            _check_field(path, field.name, values[field.name], str(field.type))
    if "family" not in values:
        raise CheckpointError(f"{path} lacks: family")
    return values


def _check_field(path: Path, name: str, value: object, kind: str) -> None:
    if kind == "int" and (type(value) is not int or value < 1):
        raise CheckpointError(f"{path}: {name} must be a positive whole number")
    if kind == "str" and (not isinstance(value, str) or not value):
        raise CheckpointError(f"{path}: {name} must be text")
    if kind == "str" and len(str(value).encode(errors="replace")) > MAX_NAME_BYTES:
        raise CheckpointError(f"{path}: {name} has more than {MAX_NAME_BYTES} bytes")


def load_sampling_defaults(
    folder: Path, defaults: SamplingParams | None = None, later_prefix: str = ""
) -> SamplingParams:
    """Read the sampling parameters of generation_config.json; `defaults` are those that it lacks.

    Stop ids and lengths are not taken from it. `later_prefix` is that of the keys for the later
    codebooks of a model of frames, whose `defaults` are those of the first; "": it has none.
    """
    path, found = folder / GENERATION_FILE, defaults or SamplingParams()
    values = read_json(path) if path.is_file() else {}
    try:
        if later_prefix:
            own = CodeSampling(found.temperature, found.top_k, found.top_p)
            given = _given(path, values, [field.name for field in fields(own)], later_prefix)
            found = replace(found, later_codes=replace(own, **given))
        return replace(found, **_given(path, values, _SAMPLING_KEYS))
    except RequestError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _given(
    path: Path, values: Mapping[str, Any], names: Iterable[str], prefix: str = ""
) -> dict[str, Any]:
    """Return the parameters that are set under `prefix`; 0 as the temperature of argmax."""
    chosen: dict[str, Any] = {
        name: _number(path, prefix + name, values[prefix + name], _SAMPLING_KEYS[name])
        for name in names
        if values.get(prefix + name) is not None
    }
    if any(values.get(prefix + key) is False for key in _SAMPLING_SWITCHES):
        chosen["temperature"] = 0.0
    return chosen


def _number(path: Path, key: str, value: object, kind: type) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{path}: {key} must be a number")
    try:
        number: float | int = kind(value)
    except (OverflowError, ValueError) as error:  # Infinity or NaN, or more digits than a float has
        raise CheckpointError(f"{path}: {key} cannot be used: {error}") from error
    return number


def load_eos_ids(folder: Path) -> tuple[int, ...]:
    """Read the end-of-sequence ids of generation_config.json, else of config.json; () if unset."""
    for name in (GENERATION_FILE, "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(type(item) is not int for item in ids):
            raise CheckpointError(f"{path}: eos_token_id must be a token id, or several")
        return tuple(ids)
    return ()
