"""Texts of flags and environment variables as values of configuration fields."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from llm import ConfigError


def flag_values(args: argparse.Namespace, model_class: type[BaseModel]) -> dict[str, Any]:
    """Return the values of one configuration class from parsed arguments, nested by section."""
    given = vars(args)
    texts = {name: given[name] for name, _ in walk_fields(model_class) if name in given}
    return nested_values(model_class, texts)


def nested_values(model_class: type[BaseModel], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert texts by dotted name to nested sections of values for the class to validate."""
    result: dict[str, Any] = {}
    for name, field in walk_fields(model_class):
        if name in texts:
            *sections, leaf = name.split(".")
            target = result
            for section in sections:
                if target.get(section) is None:
                    target[section] = {}
                target = target[section]
            target[leaf] = parse_text(name, texts[name], field)
    return result


def walk_fields(model_class: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted name, field) of every field, with the fields of a section in its place.

    A section that may be absent (`lora`) is a field of its own as well, with JSON as its text; a
    value for a field inside creates the section.
    """
    for name, field in model_class.model_fields.items():
        kind = inner_type(field.annotation)
        if kind is not field.annotation or not is_section(kind):
            yield prefix + name, field
        if is_section(kind):
            yield from walk_fields(kind, f"{prefix}{name}.")


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a type is a section of fields."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def parse_text(name: str, text: Any, field: FieldInfo) -> Any:
    """Convert the text of a flag or environment variable; numbers are left to the validation.

    "none" is None for a field that can be None; lists are "a,b" or JSON, also of a flag that is
    repeated; sections are JSON. Raises `ConfigError` with the field's name for broken JSON.
    """
    if isinstance(text, list):
        values = [parse_text(name, part, field) for part in text]
        return values[0] if len(values) == 1 else [item for value in values for item in value or ()]
    if not isinstance(text, str):
        return text
    kind = inner_type(field.annotation)
    if kind is not field.annotation and text.lower() == "none":
        return None
    is_list = get_origin(kind) is list
    if is_section(kind) or get_origin(kind) is dict or (is_list and text.startswith("[")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name}={text} is not JSON: {error}") from error
    if is_list:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def inner_type(annotation: Any) -> Any:
    """Return an annotation without its `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation
