"""`SharedFile`: a file in memory, without a name, that other processes of this user can map."""

from __future__ import annotations

import mmap
import os
import weakref

import torch
from torch import Tensor


class SharedFile:
    """Memory of zeros. The system allocates it at the first write, and frees it when no process
    maps it any more.
    """

    def __init__(self, num_bytes: int) -> None:
        """Raises `OSError` where the system has no such files (`is_available`), or no room."""
        self._file = os.memfd_create("sonant-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, num_bytes)
        self.number = os.fstat(self._file).st_ino
        """Its inode, which no other one has."""
        self.memory = self.map(self._file, num_bytes)
        """uint8 [num_bytes]"""

    @staticmethod
    def is_available() -> bool:
        """Whether the system has files in memory (Linux)."""
        return hasattr(os, "memfd_create")

    @staticmethod
    def map(file: int, num_bytes: int) -> Tensor:
        """Return the memory of a file's descriptor, which can be closed then: uint8 [num_bytes]."""
        return torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)

    @property
    def path(self) -> str:
        """Path by which other processes open it while this one runs."""
        return f"/proc/{os.getpid()}/fd/{self._file}"
