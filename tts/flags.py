"""Configuration fields as command-line flags: one flag per field, named and described by it.

A field `model.kv_cache.num_pages` becomes `--model.kv-cache.num-pages`. Only what the user gave
appears in the parsed arguments, as text: the configuration class is what checks it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from llm import ConfigError


def add_config_flags(
    parser: argparse.ArgumentParser,
    model_class: type[BaseModel],
    only: Collection[str] | None = None,
) -> None:
    """Add a flag for every field of a configuration class (or for the dotted names in `only`)."""
    group = parser.add_argument_group(f"{model_class.__name__} options")
    unavailable: Collection[str] = getattr(model_class, "UNAVAILABLE", ())
    for name, field in walk_fields(model_class):
        if only is None or name in only:
            description = (field.description or "").replace("%", "%%")
            known = name.removeprefix("draft_")  # what a model lacks, a draft model lacks, too
            lacks = known in unavailable or known.split(".")[0] in unavailable
            _add_flag(group, name, field, description + "; not available yet" * lacks)


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo, help_text: str) -> None:
    flag = "--" + name.replace("_", "-")
    shared: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    if "(default: " not in help_text:
        help_text += _default(field)
    if inner_type(field.annotation) is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(flag, action=action, help=help_text, **shared)
    else:
        group.add_argument(flag, metavar=_metavar(field), help=help_text, **shared)


def _default(field: FieldInfo) -> str:
    """The field's own default, where there is one and its description does not tell another."""
    value = getattr(field.default, "value", field.default)
    if inner_type(field.annotation) is bool:
        return f" (default: {'on' if value else 'off'})"
    has_none = field.default_factory is not None or value in (None, "", PydanticUndefined)
    return "" if has_none else f" (default: {value})"


def _metavar(field: FieldInfo) -> str:
    kind = inner_type(field.annotation)
    if get_origin(kind) is list:
        return "A,B,…"
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.value for member in kind)
    if is_section(kind) or get_origin(kind) is dict:
        return "JSON"
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "VALUE")


def flag_values(args: argparse.Namespace, model_class: type[BaseModel]) -> dict[str, Any]:
    """The values for one configuration class among parsed arguments, nested by section."""
    given = vars(args)
    texts = {name: given[name] for name, _ in walk_fields(model_class) if name in given}
    return nested_values(model_class, texts)


def nested_values(model_class: type[BaseModel], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names and texts to nested sections of values that the class can validate."""
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
    """(dotted name, field) of every field, sections replaced by the fields inside them.

    A section that may be absent (`lora`) is a field, too, whose text is JSON; a value for one of
    those inside it makes the section.
    """
    for name, field in model_class.model_fields.items():
        kind = inner_type(field.annotation)
        if kind is not field.annotation or not is_section(kind):
            yield prefix + name, field
        if is_section(kind):
            yield from walk_fields(kind, f"{prefix}{name}.")


def is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether a field of this type is a section of fields."""
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def parse_text(name: str, text: Any, field: FieldInfo) -> Any:
    """What one flag's or environment variable's text says; numbers are left to the validation.

    "none" is None where a field can be None; lists are "a,b" or JSON; sections are JSON.
    Raises `ConfigError` naming the field when the JSON is broken.
    """
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
    """An annotation without its `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return parts[0] if len(parts) == 1 else annotation
    return annotation
