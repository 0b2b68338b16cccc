"""Parser of audio_decoder_config: keyword parameters to `DecoderOptions`, without ignored keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from decoder.base import DecoderConfigError, DecoderOptions, PcmFormat


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def _positive(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise ValueError("a number above 0")
    return number


def _not_negative(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise ValueError("a number >= 0")
    return number


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("an integer >= 1")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("an integer >= 0")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _pcm_format(value: Any) -> PcmFormat:
    try:
        return PcmFormat(value)
    except ValueError:
        raise ValueError(" or ".join(f.value for f in PcmFormat)) from None


_PARSERS: dict[str, Callable[[Any], object]] = {
    "token_rate_hz": _positive,
    "max_batch": _count,
    "pcm_format": _pcm_format,
    "stateful": _flag,
    "noise_seed": _whole,
    "crossfade_ms": _not_negative,
    "look_ahead": _whole,
    "first_look_ahead": _whole,
    "num_codebooks": _count,
}


OFF: dict[str, object] = {"crossfade_ms": 0.0}
"""Values that switch a feature off, where the default is the codec's own choice."""


def parse_options(
    values: Mapping[str, object], codec: str, supported: frozenset[str]
) -> DecoderOptions:
    """Check every key and value; DecoderConfigError names the key and the allowed values.

    A key that this codec does not support is accepted with its default value.
    """
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in _PARSERS:
            raise DecoderConfigError(_unknown(key))
        if value is None:
            continue
        try:
            parsed[key] = _PARSERS[key](value)
        except ValueError as error:
            raise DecoderConfigError(
                f"audio_decoder_config: '{key}' is {value!r} but must be {error}"
            ) from None
    options = DecoderOptions(**parsed)
    _refuse_unsupported(options, codec, supported)
    return options


def _unknown(key: str) -> str:
    near = get_close_matches(key, _PARSERS, n=1)
    hint = f", did you mean '{near[0]}'?" if near else ""
    return f"audio_decoder_config: unknown key '{key}'{hint}; known: {', '.join(_PARSERS)}"


def _refuse_unsupported(options: DecoderOptions, codec: str, supported: frozenset[str]) -> None:
    defaults = DecoderOptions()
    for field in fields(options):
        value = getattr(options, field.name)
        is_default = value == getattr(defaults, field.name) or value == OFF.get(field.name)
        if not is_default and field.name not in supported:
            raise DecoderConfigError(
                f"audio_decoder_config: codec '{codec}' does not support '{field.name}'; "
                f"it takes: {', '.join(sorted(supported))}"
            )
