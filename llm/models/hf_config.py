"""A checkpoint's config.json and generation_config.json, read without the transformers package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm.errors import CheckpointError

COMPRESSED = ("int-quantized", "pack-quantized", "float-quantized", "nvfp4-pack-quantized")
NESTED_KEYS = ("text_config", "talker_config")
"""Keys of the language model's part in models of several parts."""


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """The top-level keys of a config.json."""

    path: Path
    keys: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path | str) -> HuggingFaceConfig:
        """Read a file. Raises `CheckpointError` naming the file when it cannot be read."""
        path = Path(folder) / "config.json"
        return cls(path, _read_object(path))

    @property
    def text_config(self) -> HuggingFaceConfig:
        """Return the language model's part; the config itself unless it is nested."""
        nested = next((self.keys[key] for key in NESTED_KEYS if key in self.keys), None)
        return HuggingFaceConfig(self.path, nested) if isinstance(nested, dict) else self

    @property
    def architecture(self) -> str:
        """Return the first of `architectures`."""
        names = self.keys.get("architectures")
        if not names:
            raise CheckpointError(f"{self.path} has no 'architectures'")
        return str(names[0])

    @property
    def is_int8(self) -> bool:
        """Return whether weights are stored as int8 with a scale for each output row.

        Raises `CheckpointError` for an unknown quantisation.
        """
        return self._quantization == "int-quantized"

    @property
    def is_float8(self) -> bool:
        """Return whether weights are stored as float8 with scales (see `float8_weights`).

        Raises `CheckpointError` for an unknown quantisation.
        """
        return self._quantization in ("float-quantized", "fp8")

    @property
    def _quantization(self) -> str | None:
        """Return the format of compressed tensors, or the method; None without one.

        Four-bit weights are expanded when they are read (see `packed_weights`).
        """
        quantization = self.keys.get("quantization_config")
        if not quantization:
            return None
        if not isinstance(quantization, dict):
            raise CheckpointError(f"{self.path}: quantization_config must be an object")
        method, kind = quantization.get("quant_method"), quantization.get("format")
        if method in ("gptq", "awq", "fp8"):
            return str(method)
        if method == "compressed-tensors" and kind in COMPRESSED:
            return str(kind)
        raise CheckpointError(
            f"{self.path}: quantization_config {method}/{kind} cannot be read; "
            f"compressed-tensors/{', /'.join(COMPRESSED)}, gptq, awq, fp8 and unquantised "
            "checkpoints can"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value; the default also for null."""
        value = self.keys.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """Return a key's value. Raises `CheckpointError` naming the file and the key."""
        value = self.keys.get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no '{key}'")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a key's value, which must be a positive integer."""
        value = self.require(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.path}: {key}={value!r} must be a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a key's value, which must be a number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.path}: {key}={value!r} must be a number")
        return float(value)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only language model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int

    @classmethod
    def read(cls, config: HuggingFaceConfig) -> ModelShape:
        """Read the sizes. Raises `CheckpointError` naming a key that is missing or invalid."""
        text = config.text_config
        hidden_size, num_heads = text.size("hidden_size"), text.size("num_attention_heads")
        num_kv_heads = text.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{text.path}: num_attention_heads={num_heads} must be a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        return cls(
            vocab_size=text.size("vocab_size"),
            hidden_size=hidden_size,
            num_layers=text.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=text.size("head_dim", hidden_size // num_heads),
            max_positions=text.size("max_position_embeddings", 4096),
        )


def read_eos_token_ids(folder: Path | str) -> frozenset[int]:
    """Return the ids that end a text, of generation_config.json (if there is one) and
    config.json.
    """
    path = Path(folder) / "generation_config.json"
    paths = [Path(folder) / "config.json", *([path] if path.is_file() else [])]
    return frozenset(token for path in paths for token in _eos_ids(path))


def _eos_ids(path: Path) -> list[int]:
    found = _read_object(path).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token) is not int for token in ids):
        raise CheckpointError(f"{path}: eos_token_id={found!r} must be a token id, or several")
    return ids


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return values
