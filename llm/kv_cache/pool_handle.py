"""`PoolHandle`: how another process maps a KV pool; a value for messages, without torch."""

from __future__ import annotations

from dataclasses import dataclass

CudaHandle = tuple[bytes, int, int, bytes, int]
"""CUDA's handle, size and offset of the memory, and torch's count of its readers."""


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Path and inode of the `SharedFile` of a pool of this machine and user, or the memory of each
    layer.

    The path of another container, or of a process that is gone, may be that of another file.
    """

    num_pages: int
    file: str = ""
    number: int = 0
    layers: tuple[CudaHandle, ...] = ()
