"""`StrictModel`: the base class of every configuration section.

Every value is checked when it is set; an unknown key is an error that suggests the nearest known
one.
"""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from llm.errors import ConfigError


class StrictModel(BaseModel):
    """A configuration section: unknown keys are errors, values freeze with the root."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        validate_default=False,
        revalidate_instances="always",
        allow_inf_nan=False,
    )
    SECTION: ClassVar[str] = ""  # this class's section in a configuration file
    _frozen: bool = PrivateAttr(default=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, values: Any) -> Any:
        if isinstance(values, Mapping):
            for key in values:
                if key not in cls.model_fields:
                    raise ValueError(cls.unknown_key(str(key), cls.model_fields))
        return values

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self).model_fields and self._frozen:
            raise ConfigError(f"{name} cannot change: the configuration is resolved")
        super().__setattr__(name, value)

    @classmethod
    def values_from_file(cls, path: str, section_name: str | None = None) -> dict[str, Any]:
        """Return the values of one section of a YAML, JSON or TOML file.

        The default of `section_name` is the class's own section, or the whole file when the file
        has no sections. Raises `FileNotFoundError`, or `ConfigError` naming file and sections.
        """
        return read_section(Path(path), section_name, cls.SECTION, cls.model_fields)

    @staticmethod
    def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
        """Merge layers of values, section by section; later layers take precedence."""
        return functools.reduce(merged, layers, {})

    @staticmethod
    def unknown_key(key: str, known: Iterable[str]) -> str:
        """Return the message for an unknown key, with the nearest of `known` if one is similar."""
        near = difflib.get_close_matches(key, list(known), n=1)
        return f"unknown key '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")

    def freeze(self) -> None:
        """Refuse assignments from now on, here and in every section below."""
        self._frozen = True
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, StrictModel):
                section.freeze()


def read_section(
    path: Path, section_name: str | None, own_section: str, known_keys: Collection[str]
) -> dict[str, Any]:
    """Return the values of one section.

    The default of `section_name` is `own_section`, or the whole file when that has no sections.
    Raises `FileNotFoundError`, or `ConfigError` naming the file and its sections.
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
    """Merge two layers of values, section by section; `upper` takes precedence."""
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
    import yaml  # slow to import, and only needed for YAML files

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
