"""Rotary parameters of a config.json: the base and, by `rope_type`, the scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from llm.errors import CheckpointError
from llm.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    RotaryScaling,
    YarnScaling,
)
from llm.models.hf_config import HuggingFaceConfig, ModelShape

ORIGINAL = "original_max_position_embeddings"
NUM_SECTIONS = 3  # time, height, width


def read_rotary(config: HuggingFaceConfig, shape: ModelShape) -> RotaryConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    The type "mrope" is the default one with sections. Raises `CheckpointError` naming an unknown
    type or a missing key.
    """
    keys = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(keys, dict):
        raise CheckpointError(f"{config.path}: rotary scaling must be an object, not {keys!r}")
    theta = float(keys.get("rope_theta") or config.number("rope_theta", 10000.0))
    kind = keys.get("rope_type") or keys.get("type") or "default"
    sections = _sections(config, keys, shape)
    if kind == "default" or (kind == "mrope" and sections is not None):
        return RotaryConfig(shape.head_dim, theta, sections=sections)
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{config.path}: rotary scaling '{kind}' is not supported; "
            f"default, {', '.join(_SCALINGS)} are"
        )
    given = {key: value for key, value in keys.items() if value is not None}
    try:
        scaling = _SCALINGS[kind](given, shape.max_positions)
        return RotaryConfig(shape.head_dim, theta, scaling, sections=sections)
    except KeyError as error:
        raise CheckpointError(f"{config.path}: rotary scaling '{kind}' has no {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{config.path}: rotary scaling '{kind}': {error}") from error


def _sections(
    config: HuggingFaceConfig, keys: Mapping[str, Any], shape: ModelShape
) -> tuple[int, ...] | None:
    """Return `mrope_section`; None without it, and if the pairs of the sections alternate.

    Alternating sections are known for texts alone, which have one position.
    """
    given = keys.get("mrope_section")
    if given is None or keys.get("interleaved") or keys.get("mrope_interleaved"):
        return None
    is_known = isinstance(given, list) and len(given) == NUM_SECTIONS
    if not is_known or any(type(size) is not int or size < 1 for size in given):
        raise CheckpointError(
            f"{config.path}: mrope_section={given!r} must be {NUM_SECTIONS} numbers above 0"
        )
    if sum(given) != shape.head_dim // 2:
        raise CheckpointError(
            f"{config.path}: mrope_section={given!r} must add up to {shape.head_dim // 2}, the "
            "pairs of a head"
        )
    return tuple(given)


def _linear(keys: Mapping[str, Any], max_positions: int) -> RotaryScaling:
    return LinearScaling(float(keys["factor"]))


def _dynamic(keys: Mapping[str, Any], max_positions: int) -> RotaryScaling:
    return DynamicScaling(float(keys["factor"]), max_positions)


def _llama3(keys: Mapping[str, Any], max_positions: int) -> RotaryScaling:
    return Llama3Scaling(
        factor=float(keys["factor"]),
        low_freq_factor=float(keys["low_freq_factor"]),
        high_freq_factor=float(keys["high_freq_factor"]),
        original_max_positions=int(keys.get(ORIGINAL, max_positions)),
    )


def _yarn(keys: Mapping[str, Any], max_positions: int) -> RotaryScaling:
    original = int(keys.get(ORIGINAL, max_positions))
    stretched = ORIGINAL in keys and "factor" not in keys
    factor = max_positions / original if stretched else float(keys["factor"])
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=float(keys.get("attention_factor", _yarn_magnitude(keys, factor))),
        beta_fast=float(keys.get("beta_fast") or 32),
        beta_slow=float(keys.get("beta_slow") or 1),
        truncate=bool(keys.get("truncate", True)),
    )


def _yarn_magnitude(keys: Mapping[str, Any], factor: float) -> float:
    """Return 0.1 ln(factor) + 1, or the ratio of two of these that DeepSeek's files specify."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    one, all_dimensions = keys.get("mscale"), keys.get("mscale_all_dim")
    if one and all_dimensions:
        return magnitude(float(one)) / magnitude(float(all_dimensions))
    return magnitude(1.0)


_SCALINGS: Mapping[str, Callable[[Mapping[str, Any], int], RotaryScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
