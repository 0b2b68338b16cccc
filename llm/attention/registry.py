"""Attention backends by name, imported on demand."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from llm.attention.base import AttentionBackend
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool

_BACKENDS = {
    "sdpa": ("llm.attention.sdpa", "SdpaBackend"),
    "gathered": ("llm.attention.gathered", "GatheredBackend"),
}


def supported_backends() -> tuple[str, ...]:
    """Names that `create_attention_backend` takes."""
    return tuple(_BACKENDS)


def create_attention_backend(
    name: str, pool: KVPool, windows: Sequence[int | None] = ()
) -> AttentionBackend[Any]:
    """The backend `name` over `pool`; `windows` as in `AttentionBackend`.

    Raises `ConfigError` naming the supported ones.
    """
    if name not in _BACKENDS:
        raise ConfigError(f"no attention backend '{name}'; supported: {', '.join(_BACKENDS)}")
    module, attribute = _BACKENDS[name]
    backend: AttentionBackend[Any] = getattr(import_module(module), attribute)(pool, windows)
    return backend
