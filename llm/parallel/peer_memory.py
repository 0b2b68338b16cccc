"""`PeerMemory`: sums of small tensors that each GPU reads from the others' memory.

One kernel copies a rank's tensor to memory that all ranks map, waits for the others, and adds: for
the few rows of decode steps that is faster than NCCL, whose time is that of its protocol. The
kernel is torch's `one_shot_all_reduce`; it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_BYTES = {2: 4 << 20}  # of a tensor, by the number of ranks: each reads all of every other one's
MANY_RANKS_BYTES = 512 << 10
ALIGNMENT = 16  # bytes that one thread reads
DTYPES = (torch.float32, torch.bfloat16)


class PeerMemory:
    """Memory of one rank that the other ranks of one machine read, and their memory.

    All ranks create it at once. Raises `RuntimeError` where memory cannot be shared.
    """

    num_created = 0
    """In this process. Torch numbers exchanges of handles in each process: processes that have
    created different numbers of these wait for each other for ever."""

    def __init__(self, name: str, group: Any, device: torch.device) -> None:
        """Map the memory of all ranks of `group`, a torch.distributed.ProcessGroup."""
        distributed: Any = torch._C._distributed_c10d
        PeerMemory.num_created += 1
        self._name = name
        num_bytes = MAX_BYTES.get(group.size(), MANY_RANKS_BYTES)
        distributed._register_process_group(name, group)
        try:
            memory = distributed._SymmetricMemory
            self._buffer: Tensor = memory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, device, name
            )
            memory.rendezvous(self._buffer, name)
        except BaseException:
            distributed._unregister_process_group(name)
            raise

    def fits(self, tensor: Tensor) -> bool:
        """Return whether `all_reduce` takes a tensor. Ranks with equal shapes agree."""
        num_bytes = tensor.numel() * tensor.element_size()
        return (
            tensor.dtype in DTYPES
            and tensor.is_contiguous()
            and num_bytes % ALIGNMENT == 0
            and 0 < num_bytes <= len(self._buffer)
        )

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, a new tensor, on every rank."""
        num_bytes = partial.numel() * partial.element_size()
        shared = self._buffer[:num_bytes].view(partial.dtype).view(partial.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            shared, partial, "sum", self._name
        )
        return total

    def close(self) -> None:
        """Forget the group; the memory is freed with this object."""
        distributed: Any = torch._C._distributed_c10d
        distributed._unregister_process_group(self._name)
