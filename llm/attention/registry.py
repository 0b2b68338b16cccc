"""Attention backends by name, imported on demand."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from llm.attention import gathered, sdpa
from llm.attention.base import AttentionBackend, AttentionLoad, AttentionOptions
from llm.attention.workspaces import WorkspaceSizes, count_processors, workspace_bytes
from llm.errors import ConfigError
from llm.kv_cache.kv_pool import KVPool

logger = logging.getLogger(__name__)

AUTO = "auto"

_BACKENDS = {
    "sdpa": ("llm.attention.sdpa", "SdpaBackend"),
    "gathered": ("llm.attention.gathered", "GatheredBackend"),
    "flashinfer": ("llm.attention.flashinfer", "FlashInferBackend"),
}


def create_attention_backend(
    name: str, pool: KVPool, options: AttentionOptions
) -> AttentionBackend[Any]:
    """Create the backend `name` over `pool`; "auto" selects the best for the pool's device.

    Raises `ConfigError` naming the supported ones, or for a backend that cannot run here.
    """
    if name == AUTO:
        return _best_backend(pool, options)
    if name not in _BACKENDS:
        raise ConfigError(f"no attention backend '{name}'; supported: {', '.join(_BACKENDS)}")
    module, attribute = _BACKENDS[name]
    try:
        found = import_module(module)
    except ImportError as error:
        raise ConfigError(f"the attention backend {name} cannot be loaded: {error}") from error
    backend: AttentionBackend[Any] = getattr(found, attribute)(pool, options)
    return backend


def attention_bytes(name: str, device: torch.device, load: AttentionLoad) -> int:
    """Return the bytes of the backend of `create_attention_backend`, without the KV pool.

    Those of torch's own attention are an estimate.
    """
    if name == AUTO:
        name = "sdpa" if device.type == "cpu" or not load.num_layers else _gpu_backend()
    if name == "flashinfer":
        heads = (load.num_kv_heads, load.num_groups, load.head_dim)
        sizes = WorkspaceSizes(load.num_rows, *heads, count_processors(device))
        return workspace_bytes(sizes, load.windows)
    estimates = {"sdpa": sdpa.scratch_bytes, "gathered": gathered.scratch_bytes}
    return estimates[name](load) if name in estimates else 0


def _gpu_backend() -> str:
    return "flashinfer" if find_spec("flashinfer") else "gathered"


def _best_backend(pool: KVPool, options: AttentionOptions) -> AttentionBackend[Any]:
    if pool.device.type == "cpu" or not pool.num_layers:
        return create_attention_backend("sdpa", pool, options)
    try:
        return create_attention_backend("flashinfer", pool, options)
    except ConfigError as error:
        logger.warning("attention is computed by torch, which is slower: %s", error)
        return create_attention_backend("gathered", pool, options)
