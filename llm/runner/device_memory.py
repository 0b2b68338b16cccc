"""Memory of a device, in GiB (2³⁰ bytes)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2**30
MOST_OF_FREE = 0.9  # of a GPU's free memory: the driver and libraries take some, too


def get_available_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """Return the free memory of a GPU in GiB; 0.0 without CUDA."""
    return _gpu_memory(device, gpu_id)[0] / GIB


def get_total_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """Return the total memory of a GPU in GiB; 0.0 without CUDA."""
    return _gpu_memory(device, gpu_id)[1] / GIB


def available_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated now, on a GPU or in the host's memory."""
    if device.type == "cuda":
        return _gpu_memory("cuda", device.index or 0)[0]
    return _host_bytes()


def usable_bytes(device: torch.device, share: float) -> int:
    """Return how many bytes a share of a device's memory has.

    That is at most what other programs leave of a GPU's, of which they may use the rest. On the
    host it is that share of what is free.
    """
    if device.type != "cuda":
        return int(_host_bytes() * share)
    free, total = _gpu_memory("cuda", device.index or 0)
    return int(min(total * share, free * max(share, MOST_OF_FREE)))


def _gpu_memory(device: str, gpu_id: int) -> tuple[int, int]:
    if device != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.mem_get_info(gpu_id)


def _host_bytes() -> int:
    """Return Linux's estimate of available memory without swapping; else the free pages."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
