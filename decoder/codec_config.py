"""Reader of the sizes in a published codec's config.json: known keys with checked types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from decoder.base import DecoderConfigError

ValueT = TypeVar("ValueT", int, float, bool, str)


def scalar(config: Mapping[str, Any], codec: str, key: str, default: ValueT) -> ValueT:
    """Return a value of the default's type; an absent or null key gives the default."""
    value: Any = config.get(key)
    if value is None:
        return default
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    is_below = kind is int and type(value) is int and value < 1
    if type(value) is not kind or is_below:
        raise DecoderConfigError(f"{codec} config: {key} is {value!r} but must be {_kind(default)}")
    checked: ValueT = value
    return checked


def sizes(
    config: Mapping[str, Any], codec: str, key: str, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Return a tuple of positive integers."""
    value = config.get(key)
    if value is None:
        return default
    is_list = isinstance(value, list) and value
    if not is_list or any(type(item) is not int or item < 1 for item in value):
        raise DecoderConfigError(
            f"{codec} config: {key} is {value!r} but must be a list of positive whole numbers"
        )
    return tuple(value)


def must_be(config: Mapping[str, Any], codec: str, key: str, only: object) -> None:
    """Raise an error for a variant of an architecture that is not implemented."""
    if key in config and config[key] != only:
        raise DecoderConfigError(
            f"{codec} config: {key} is {config[key]!r}, but only {only!r} is supported"
        )


def _kind(default: object) -> str:
    names = {int: "a positive whole number", float: "a number", bool: "true or false"}
    return names.get(type(default), "text")
