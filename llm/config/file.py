"""Configuration files: one section of a YAML, JSON or TOML file, and layers of values as one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

from llm.errors import ConfigError


def read_section(
    path: Path, section_name: str | None, own_section: str, known_keys: Collection[str]
) -> dict[str, Any]:
    """The values of one section.

    Without `section_name` it is `own_section`, or the whole file when that has no sections.
    Raises `FileNotFoundError`, or `ConfigError` naming the file and the sections it has.
    """
    values = _read_mapping(path)
    name = own_section if section_name is None else section_name
    if name in values:
        section = values[name]
    elif section_name is None and (not values or any(key in values for key in known_keys)):
        section = values
    else:
        listed = ", ".join(str(key) for key in values) or "none"
        raise ConfigError(f"{path} has no section '{name}'; its sections: {listed}")
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: section '{name}' holds no keys")
    return section


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers of values as one, section by section; what `upper` says wins."""
    result = dict(lower)
    for key, value in upper.items():
        below = result.get(key)
        sections = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(cast(Mapping[str, Any], below), value) if sections else value
    return result


def _read_mapping(path: Path) -> dict[str, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".yaml": _yaml,
        ".yml": _yaml,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path} must end in .yaml, .yml, .json or .toml")
    try:
        values = reader(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it is nested too deeply") from None
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys")
    return values or {}


def _yaml(text: str) -> Any:
    import yaml  # only those who have such a file wait for it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
