"""`PeerMemory`: sums of tensors through memory that all GPUs of a machine map.

`Mailbox` is for the sums of a layer, which kernels of this repository compute
(`llm.kernels.peer_sums`). For other small tensors one kernel, torch's `one_shot_all_reduce`, copies
a rank's tensor to memory that all ranks map, waits for the others, and adds: for few rows that is
faster than NCCL, whose time is that of its protocol. All of them can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_BYTES = {2: 4 << 20}  # of a tensor, by the number of ranks: each reads all of every other one's
MANY_RANKS_BYTES = 512 << 10
ALIGNMENT = 16  # bytes that one thread reads
DTYPES = (torch.float32, torch.bfloat16)
MAILBOXES = 2
MAILBOX_PLACES = 1 << 15  # two rows of 16,384 numbers
PARCEL_BYTES = 4 << 20


class Mailbox(NamedTuple):
    """Memory of every rank for sums that kernels compute (`llm.kernels.peer_sums`).

    A sum waits for the numbers of all ranks, so a rank that has ended one knows that the others
    have begun it, and not more: two sums in a row use different mailboxes.
    """

    rank: int
    counts: Tensor  # int32 [capacity]: the sums that each place has had
    inboxes: tuple[int, ...]  # address of each rank's words, int64 [ranks, capacity]
    parcels: tuple[int, ...]  # address of each rank's numbers that the others read
    parcel: Tensor  # uint8 [bytes]: this rank's

    @property
    def capacity(self) -> int:
        """Number of words that one rank can send."""
        return len(self.counts)

    def parcel_of(self, x: Tensor) -> Tensor | None:
        """Return this rank's parcel in the shape of x; None if it is too small."""
        num_bytes = x.numel() * x.element_size()
        if num_bytes > len(self.parcel):
            return None
        return self.parcel[:num_bytes].view(x.dtype).view(x.shape)


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
            self._mailboxes = self._create_mailboxes(memory, name, group, device)
        except BaseException:
            distributed._unregister_process_group(name)
            raise

    def _create_mailboxes(
        self, memory: Any, name: str, group: Any, device: torch.device
    ) -> list[Mailbox]:
        rank, size = group.rank(), group.size()
        num_bytes = PARCEL_BYTES + 8 * size * MAILBOX_PLACES
        self._shared: Tensor = memory.empty_strided_p2p(
            (MAILBOXES * num_bytes,), (1,), torch.uint8, device, name
        )
        self._shared.zero_()
        torch.cuda.synchronize(device)  # before another rank writes
        handle = memory.rendezvous(self._shared, name)
        starts = [
            handle.get_buffer(other, self._shared.shape, torch.uint8, 0).data_ptr()
            for other in range(size)
        ]
        return [
            Mailbox(
                rank,
                torch.zeros(MAILBOX_PLACES, dtype=torch.int32, device=device),
                tuple(start + first + PARCEL_BYTES for start in starts),
                tuple(start + first for start in starts),
                self._shared[first : first + PARCEL_BYTES],
            )
            for first in range(0, MAILBOXES * num_bytes, num_bytes)
        ]

    def mailbox(self, number: int) -> Mailbox:
        """Return one of two mailboxes."""
        return self._mailboxes[number]

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
