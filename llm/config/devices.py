"""Where a model runs when nobody says so. Without torch: front ends resolve configurations, too."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, version

CPU, FIRST_GPU = "cpu", "cuda:0"
DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
SUCCESS = 0


def default_device() -> str:
    """The first CUDA device that this process may use, or the CPU."""
    return FIRST_GPU if has_cuda() else CPU


def has_cuda() -> bool:
    """Whether torch is built for CUDA and the driver shows a device. Nothing is allocated on it."""
    try:
        if version("torch").endswith("+cpu"):
            return False
        driver = ctypes.CDLL(DRIVER)
    except (PackageNotFoundError, OSError):
        return False
    count = ctypes.c_int(0)
    is_usable = (
        driver.cuInit(0) == SUCCESS and driver.cuDeviceGetCount(ctypes.byref(count)) == SUCCESS
    )
    return is_usable and count.value > 0
