"""`StrictModel`: the base of every configuration section.

Every value is checked when it is set; an unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from llm.config.file import merged, read_section
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
    SECTION: ClassVar[str] = ""  # this class's own section in a configuration file
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
        """The values of one section of a YAML, JSON or TOML file.

        Without `section_name` it is this class's own section, or the whole file when the file
        has no sections. Raises `FileNotFoundError`, or `ConfigError` naming file and sections.
        """
        return read_section(Path(path), section_name, cls.SECTION, cls.model_fields)

    @staticmethod
    def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
        """Layers of values as one, section by section; the later layer wins."""
        return functools.reduce(merged, layers, {})

    @staticmethod
    def unknown_key(key: str, known: Iterable[str]) -> str:
        """The message for an unknown key: names the nearest of `known` if one is near."""
        near = difflib.get_close_matches(key, list(known), n=1)
        return f"unknown key '{key}'" + (f"; did you mean '{near[0]}'?" if near else "")

    def freeze(self) -> None:
        """Refuse assignments from now on, here and in every section below."""
        self._frozen = True
        for name in type(self).model_fields:
            section = getattr(self, name)
            if isinstance(section, StrictModel):
                section.freeze()
