"""Flags of `tts.serve` as a mapping, which a configuration file of Ray Serve can hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from llm import ConfigError, StrictModel
from tts.config.flags import SHORT_FLAGS
from tts.config.pipeline import CONFIG_CLASSES
from tts.config.sources import walk_fields

CONFIG_FILE = "config_file"


def parsed_flags(flags: Mapping[str, Any]) -> argparse.Namespace:
    """Return flags as the parser of `tts.serve` returns them.

    Names are those of flags without the first dashes, or of fields; values are texts or typed
    values. Raises ConfigError for an unknown name, and for a field that is named twice.
    """
    known = dict(_known())
    found: dict[str, Any] = {}
    for flag, value in flags.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name not in known:
            raise ConfigError(StrictModel.unknown_key(name, known))
        if known[name] in found:
            raise ConfigError(f"{flag}: {known[name]} is given twice")
        found[known[name]] = value
    return argparse.Namespace(**found)


def _known() -> Iterator[tuple[str, str]]:
    """Yield the name of each flag and the field that it sets."""
    yield CONFIG_FILE, CONFIG_FILE
    for flag, (field, _) in SHORT_FLAGS.items():
        yield flag.removeprefix("--"), field
    for model_class in CONFIG_CLASSES:
        for field, _ in walk_fields(model_class):
            yield field, field


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `tts.serve` for these flags; raises as `parsed_flags` does."""
    return [
        argument
        for field, value in vars(parsed_flags(flags)).items()
        for argument in _arguments("--" + field.replace("_", "-"), value)
    ]


def _arguments(flag: str, value: Any) -> Iterator[str]:
    match value:
        case bool():
            yield flag if value else flag.replace("--", "--no-", 1)
        case list() | dict():
            yield f"{flag}={json.dumps(value)}"
        case None:
            yield f"{flag}=none"
        case _:
            yield f"{flag}={value}"
