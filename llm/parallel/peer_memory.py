"""`PeerMemory`: sums of tensors through memory that all GPUs of a machine map.

`Mailbox` is for the sums of a layer with few rows: each GPU writes its numbers into the others'
memory, in the kernel that computes them (`llm.kernels.peer_sums`). For other small tensors one
kernel copies a rank's tensor to memory that all ranks map, waits for the others, and adds: for
the few rows of decode steps that is faster than NCCL, whose time is that of its protocol. The
kernel is torch's `one_shot_all_reduce`; it can be captured in a CUDA graph.
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
MAILBOX_PLACES = 1 << 18  # 64 rows of 4,096 numbers, 2 MiB for each rank that writes them


class Mailbox(NamedTuple):
    """Memory of every rank in which the other ranks leave numbers to be summed.

    A sum waits for the numbers of all ranks, so a rank that has ended one knows that the others
    have begun it, and not more: two sums in a row use different mailboxes.
    """

    rank: int
    counts: Tensor  # int32 [capacity]: the sums that each place has had
    inboxes: tuple[int, ...]  # address of each rank's words, int64 [ranks, capacity]

    @property
    def capacity(self) -> int:
        """Number of numbers in one sum, at most."""
        return len(self.counts)


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
        num_words = size * MAILBOX_PLACES
        self._words: Tensor = memory.empty_strided_p2p(
            (MAILBOXES * num_words,), (1,), torch.int64, device, name
        )
        self._words.zero_()
        torch.cuda.synchronize(device)  # before another rank writes
        handle = memory.rendezvous(self._words, name)
        return [
            Mailbox(
                rank,
                torch.zeros(MAILBOX_PLACES, dtype=torch.int32, device=device),
                tuple(
                    handle.get_buffer(
                        other, (num_words,), torch.int64, number * num_words
                    ).data_ptr()
                    for other in range(size)
                ),
            )
            for number in range(MAILBOXES)
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
