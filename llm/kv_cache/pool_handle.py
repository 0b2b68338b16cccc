"""`PoolHandle`: how another process maps a KV pool; a value for messages, without torch."""

from __future__ import annotations

from dataclasses import dataclass

CudaHandle = tuple[bytes, int, int, bytes, int]
"""CUDA's handle, size and offset of the memory, and torch's count of its readers."""


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Path of the `SharedFile` of a pool of this machine and user, or the memory of each layer."""

    num_pages: int
    file: str = ""
    layers: tuple[CudaHandle, ...] = ()
