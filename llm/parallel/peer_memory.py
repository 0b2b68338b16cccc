"""`PeerMemory`: sums of tensors through memory that all GPUs of a machine map.

`Mailbox` is for the sums of a layer, which kernels of this repository compute
(`llm.kernels.peers`). For other small tensors one kernel, torch's `one_shot_all_reduce`, copies
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
MAILBOXES = 3  # two for sums, one for logits
MAILBOX_PLACES = 1 << 15  # two rows of 16,384 numbers
PARCEL_BYTES = 4 << 20
SHELF_BLOCK = 4096  # columns that one program gathers, each with a place of the mailbox


class Mailbox(NamedTuple):
    """Memory of every rank for sums that kernels compute (`llm.kernels.peers`).

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


class Shelf(NamedTuple):
    """Memory of every rank with columns of the same rows, which the other ranks read."""

    rows: Tensor  # float32 [R, N]: this rank's columns
    shelves: tuple[int, ...]  # address of each rank's
    mailbox: Mailbox

    @property
    def num_parts(self) -> int:
        """Number of blocks of a row's columns."""
        return -(-self.rows.shape[1] // SHELF_BLOCK)


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
        self._name, self._group, self._device = name, group, device
        num_bytes = MAX_BYTES.get(group.size(), MANY_RANKS_BYTES)
        distributed._register_process_group(name, group)
        try:
            memory = distributed._SymmetricMemory
            self._buffer: Tensor = memory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, device, name
            )
            memory.rendezvous(self._buffer, name)
            self._mailboxes = self._create_mailboxes()
            self._shelves: list[tuple[Tensor, list[int]]] = []
        except BaseException:
            distributed._unregister_process_group(name)
            raise

    def _share(self, num_bytes: int) -> tuple[Tensor, list[int]]:
        """Return memory uint8 [num_bytes] that the other ranks map, zeros, and the addresses of
        all ranks' memory.
        """
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        buffer: Tensor = memory.empty_strided_p2p(
            (num_bytes,), (1,), torch.uint8, self._device, self._name
        )
        buffer.zero_()
        torch.cuda.synchronize(self._device)  # before another rank writes
        handle = memory.rendezvous(buffer, self._name)
        ranks = range(self._group.size())
        return buffer, [
            handle.get_buffer(rank, buffer.shape, torch.uint8, 0).data_ptr() for rank in ranks
        ]

    def _create_mailboxes(self) -> list[Mailbox]:
        rank, size = self._group.rank(), self._group.size()
        num_bytes = PARCEL_BYTES + 8 * size * MAILBOX_PLACES
        self.shared, starts = self._share(MAILBOXES * num_bytes)
        return [
            Mailbox(
                rank,
                torch.zeros(MAILBOX_PLACES, dtype=torch.int32, device=self._device),
                tuple(start + first + PARCEL_BYTES for start in starts),
                tuple(start + first for start in starts),
                self.shared[first : first + PARCEL_BYTES],
            )
            for first in range(0, MAILBOXES * num_bytes, num_bytes)
        ]

    def shelf(self, num_rows: int, num_columns: int) -> Shelf | None:
        """Return a shelf for float32 [num_rows, num_columns] of each rank; None where it does not
        fit. All ranks call it with the same numbers. The next call returns the same memory.

        Earlier memory is kept: captured graphs use its address.
        """
        num_bytes = 4 * num_rows * num_columns
        if num_rows * -(-num_columns // SHELF_BLOCK) > MAILBOX_PLACES:
            return None
        if not self._shelves or len(self._shelves[-1][0]) < num_bytes:
            if torch.cuda.is_current_stream_capturing():
                return None
            self._shelves.append(self._share(1 << (num_bytes - 1).bit_length()))
        buffer, starts = self._shelves[-1]
        rows = buffer[:num_bytes].view(torch.float32).view(num_rows, num_columns)
        return Shelf(rows, tuple(starts), self._mailboxes[-1])

    def mailbox(self, number: int) -> Mailbox:
        """Return one of two mailboxes for sums."""
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
