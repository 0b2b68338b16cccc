"""`ProcessGroup`: ranks in processes of one machine, one process for each device.

    rank 0   forward ── all_reduce … all_gather ── sample
    rank 1   forward ── all_reduce … all_gather ── sample

Numbers of the host use gloo. Tensors use gloo on CPUs, and NCCL on GPUs; small sums use peer
memory where all GPUs can read each other's.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm.errors import ConfigError
from llm.parallel.bounded_end import BoundedEnd
from llm.parallel.group import Group
from llm.parallel.peer_memory import Mailbox, PeerMemory, Shelf

logger = logging.getLogger(__name__)

START_TIMEOUT = timedelta(minutes=10)  # of the ranks to find each other
MIN_SCRATCH_BYTES = 1 << 16
WAIT_TIMEOUT = timedelta(days=365)  # between steps; a rank that ends closes its connections


class ProcessGroup(Group):
    """One rank of several processes that meet at a file."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Wait for all ranks. `meeting` is a file that no earlier group has used.

        Raises `RuntimeError` when a rank does not come, `ConfigError` for a torch without
        collectives.
        """
        distributed = torch.distributed
        if not distributed.is_available():
            raise ConfigError("several devices need a build of torch with torch.distributed")
        self.rank, self.size = rank, size
        store = distributed.FileStore(str(meeting), size)
        store.set_timeout(START_TIMEOUT)
        self._host: Any = _gloo(distributed.PrefixStore("host", store), rank, size)
        self._device = device
        self._tensors: Any = self._host
        self._peers: PeerMemory | None = None
        self._end: BoundedEnd | None = None
        if device.type == "cuda":
            self._tensors = _nccl(distributed.PrefixStore("device", store), rank, size, device)
            self._end = BoundedEnd(self._tensors)
            # Connect: a captured graph cannot do that.
            self._tensors.allreduce([torch.zeros(1, device=device)]).wait()
            torch.cuda.synchronize(device)
            name = f"sonant {meeting}"
            self._peers = self._peer_memory(name, distributed.PrefixStore("peers", store))
        self.sums_in_order = device.type == "cpu"
        self._buffers: list[Tensor] = []

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group`.

        GPUs may sum in place. On CPUs, and for `sums_in_order`, the sum is taken in the order of
        ranks, so that an element does not depend on its place in the tensor.
        """
        if not self.sums_in_order:
            if self._peers is not None and self._peers.fits(partial):
                return self._peers.all_reduce(partial)
            self._tensors.allreduce([partial]).wait()
            return partial
        first, *others = self._gathered(partial)
        total = first + others[0]
        for other in others[1:]:
            total += other
        return total

    @property
    def shares_memory(self) -> bool:
        """Whether small sums of GPUs use peer memory."""
        return self._peers is not None

    def mailbox(self, number: int) -> Mailbox | None:
        """See `Group`."""
        return None if self._peers is None else self._peers.mailbox(number)

    def shelf(self, num_rows: int, num_columns: int) -> Shelf | None:
        """See `Group`."""
        return None if self._peers is None else self._peers.shelf(num_rows, num_columns)

    def _peer_memory(self, name: str, store: Any) -> PeerMemory | None:
        """Share memory between all ranks; None where one of them cannot."""
        mine = self._device.index or 0
        devices = self._numbers(mine)
        reads = all(
            other == mine or torch.cuda.can_device_access_peer(mine, other) for other in devices
        )
        if not self.minimum(reads) or len(set(self._numbers(PeerMemory.num_created))) > 1:
            return None
        group: Any = torch.distributed.ProcessGroup(store, self.rank, self.size)
        kind = torch.distributed.ProcessGroup.BackendType.NCCL
        group._register_backend(self._device, kind, self._tensors)
        group._set_default_backend(kind)
        group._set_group_name(name)
        try:
            peers = PeerMemory(name, group, self._device)
        except RuntimeError as error:
            logger.warning("GPUs share no memory, sums of few rows are slower: %s", error)
            self.minimum(0)
            return None
        if self.minimum(1):
            return peers
        peers.close()
        return None

    def all_gather(self, shard: Tensor) -> Tensor:
        """See `Group`."""
        return torch.cat(tuple(self._gathered(shard)), dim=-1)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks [ranks, *shape]; the next collective overwrites them."""
        num_bytes = tensor.numel() * tensor.element_size()
        gathered = self._scratch(num_bytes * self.size).view(tensor.dtype)
        self._tensors._allgather_base(gathered, tensor.contiguous().view(-1)).wait()
        return gathered.view(self.size, *tensor.shape)

    def _scratch(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes]. Earlier scratch is kept: captured graphs use its address."""
        if not self._buffers or len(self._buffers[-1]) < num_bytes:
            size = max(num_bytes, MIN_SCRATCH_BYTES, 2 * sum(map(len, self._buffers)))
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        return self._buffers[-1][:num_bytes]

    def signal_buffers(self) -> list[Tensor]:
        """See `Group`: what the other ranks read, else this rank's scratch, none before the first
        collective that needs some.
        """
        return self._buffers[-1:] if self._peers is None else [self._peers.shared]

    def minimum(self, number: int) -> int:
        """See `Group`."""
        return min(self._numbers(number))

    def _numbers(self, number: int) -> list[int]:
        """Return all ranks' numbers; the host waits."""
        numbers = torch.tensor([number])
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        self._host.allgather([found], [numbers]).wait()
        return [int(one) for one in found]

    def abort(self) -> None:
        """See `Group`. Gloo's collectives raise without it when a connection ends."""
        if self._end is not None:
            self._end.begin()

    def close(self) -> None:
        """See `Group`. The other ranks have ended."""
        if self._peers is not None:
            self._peers.close()
        if self._end is not None:
            self._end.wait()
        self._host = self._tensors = self._peers = None
        self._buffers.clear()


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Create the backend of host tensors, which only connects to processes of this machine.

    Returns when all ranks are connected: torch has crashed once where one rank sent before another
    one's constructor had returned.
    """
    backend: Any = torch.distributed.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = WAIT_TIMEOUT
    group = backend(store, rank, size, options)
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(size)])
    return group


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Create the backend of a GPU's tensors, which connects in its first collective.

    NVLink multicast stays off, and torch's thread that reads the store now and then: the file is
    removed before the group ends, and reading it would wait.
    """
    for name in ("NCCL_NVLS_ENABLE", "TORCH_NCCL_ENABLE_MONITORING"):
        os.putenv(name, "0")
    os.putenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(device)
    backend: Any = torch.distributed.ProcessGroupNCCL
    return backend(store, rank, size, backend.Options())
