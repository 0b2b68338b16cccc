"""`create_kv_manager`: the page manager of a pipeline, and the host memory behind it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from llm.config import KVCacheConfig
from llm.errors import CapacityError, ConfigError
from llm.kv_cache.host_pool import HostPool
from llm.kv_cache.manager import KVCacheManager
from llm.runner.device_memory import GIB, available_bytes
from llm.runner.device_stream import DeviceStream
from llm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

HOST_SHARE = 0.8  # of the host's free memory, at most


def create_kv_manager(
    cache: KVCacheConfig, runners: Sequence[ModelRunner], stream: DeviceStream
) -> KVCacheManager:
    """For an initialized runner, and one that shares its page ids (a draft model's).

    Copies to and from the host run on `stream`.
    """
    plan = runners[0].memory_plan
    assert plan is not None  # `initialize` has made it
    host = None
    if cache.enable_kvcache_swapping_to_host:
        host = _host_pool(cache.host_kvcache_swap_space_gb, plan.page_bytes, runners, stream)
    return KVCacheManager(
        plan.num_pages, cache.kv_cache_page_size, cache.enable_prefix_caching, host=host
    )


def _host_pool(
    space_gb: float, page_bytes: int, runners: Sequence[ModelRunner], stream: DeviceStream
) -> HostPool:
    pools = [runner.token_to_kv_pool for runner in runners if runner.token_to_kv_pool is not None]
    wanted = int(space_gb * GIB)
    most = int(available_bytes(torch.device("cpu")) * HOST_SHARE)
    if wanted < page_bytes:
        raise ConfigError(
            f"model.kv_cache.host_kvcache_swap_space_gb={space_gb} holds no page of "
            f"{page_bytes} bytes"
        )
    if most < page_bytes:
        raise CapacityError(f"the host has no memory for a KV page of {page_bytes} bytes")
    if wanted > most:
        logger.warning(
            "host_kvcache_swap_space_gb is cut from %.1f to %.1f GiB, %.0f %% of the free memory",
            space_gb,
            most / GIB,
            100 * HOST_SHARE,
        )
    return HostPool(pools, min(wanted, most) // page_bytes, stream.launch)
