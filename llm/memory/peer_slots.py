"""`PeerSlots`: slots in a GPU's memory that another process of this machine writes from its GPU.

The memory is shared by CUDA's handles of memory (IPC): its writer maps it on its own device, so
that a copy takes the shortest way between the two. The writer maps a slot's memory for as long as
its `PeerSlots` exist, and the reader's memory is not used again before that (torch counts).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Handle = tuple[bytes, int, int, bytes, int]
"""CUDA's handle, size and offset of the memory, and torch's count of its readers."""


class PeerSlots:
    """`num_slots` of `slot_bytes` each, in the memory of the process that creates it."""

    def __init__(self, memory: Tensor, num_slots: int, slot_bytes: int) -> None:
        """Use uint8 memory [num_slots × slot_bytes]; see `create` and `open`."""
        self._slots = memory.view(num_slots, slot_bytes)

    @classmethod
    def create(cls, device: torch.device, num_slots: int, slot_bytes: int) -> PeerSlots:
        """Allocate slots on a GPU. Raises `RuntimeError`, torch's of a lack of memory included."""
        memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=device)
        return cls(memory, num_slots, slot_bytes)

    def share(self) -> Handle:
        """Return the handle for one other process. Raises `RuntimeError` where there is none."""
        storage: Any = self._slots.untyped_storage()
        _, handle, size, offset, counter, place, _, _ = storage._share_cuda_()
        return handle, size, offset, counter, place

    @classmethod
    def open(
        cls, handle: Handle, device: torch.device, num_slots: int, slot_bytes: int
    ) -> PeerSlots:
        """Map the slots of another process on this process's GPU.

        Raises `RuntimeError` where its GPU cannot reach them, `ValueError` for other sizes.
        """
        memory_handle, size, offset, counter, place = handle
        if size != num_slots * slot_bytes:
            raise ValueError(f"{size} bytes for {num_slots} slots of {slot_bytes}")
        storage: Any = torch.UntypedStorage
        # Without the event of the memory's last writer: what it contains is not read here.
        shared = storage._new_shared_cuda(
            device.index or 0, memory_handle, size, offset, counter, place, b"", False
        )
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(shared)
        return cls(memory, num_slots, slot_bytes)

    def __getitem__(self, slot: int) -> Tensor:
        """Return a slot: uint8 [slot_bytes]. Raises `IndexError` for an invalid number."""
        return self._slots[slot]
