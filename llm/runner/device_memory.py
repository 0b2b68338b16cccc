"""How much memory a device has, in GiB (2³⁰ bytes)."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 2**30


def get_available_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """GiB free on a GPU; 0.0 without CUDA."""
    return _gpu_memory(device, gpu_id)[0] / GIB


def get_total_gpu_memory(device: str = "cuda", gpu_id: int = 0) -> float:
    """GiB of a GPU in all; 0.0 without CUDA."""
    return _gpu_memory(device, gpu_id)[1] / GIB


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now, on a GPU or in the host's memory."""
    if device.type == "cuda":
        return _gpu_memory("cuda", device.index or 0)[0]
    return _host_bytes()


def _gpu_memory(device: str, gpu_id: int) -> tuple[int, int]:
    if device != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.mem_get_info(gpu_id)


def _host_bytes() -> int:
    """Linux's own estimate of what can be had without swapping; else the pages nobody uses."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
