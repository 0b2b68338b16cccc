"""`ProcessGroup`: ranks in processes of one machine, one process for each device.

    rank 0   forward ── all_reduce … all_gather ── sample
    rank 1   forward ── all_reduce … all_gather ── sample

Numbers of the host use gloo. Tensors use gloo on CPUs, and NCCL on GPUs.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm.errors import ConfigError
from llm.parallel.group import Group

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
        if device.type == "cuda":
            self._tensors = _nccl(distributed.PrefixStore("device", store), rank, size, device)
        self.sums_in_order = device.type == "cpu"
        self._buffers: list[Tensor] = []

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group`.

        NCCL sums in place. On CPUs, and for `sums_in_order`, the sum is taken in the order of
        ranks, so that an element does not depend on its place in the tensor.
        """
        if not self.sums_in_order:
            self._tensors.allreduce([partial]).wait()
            return partial
        first, *others = self._gathered(partial)
        total = first + others[0]
        for other in others[1:]:
            total += other
        return total

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
        """See `Group`: this rank's scratch, none before the first collective that needs some."""
        return self._buffers[-1:]

    def minimum(self, number: int) -> int:
        """See `Group`."""
        numbers = torch.tensor([number])
        found = [torch.empty_like(numbers) for _ in range(self.size)]
        self._host.allgather([found], [numbers]).wait()
        return int(torch.cat(found).min())

    def abort(self) -> None:
        """See `Group`. Gloo's collectives raise without it when a connection ends."""
        if self._device.type == "cuda":
            self._tensors.abort()

    def close(self) -> None:
        """See `Group`."""
        self._host = self._tensors = None
        self._buffers.clear()


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Create the backend of host tensors, which only connects to processes of this machine."""
    backend: Any = torch.distributed.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = WAIT_TIMEOUT
    return backend(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Create the backend of a GPU's tensors, and connect: a captured graph cannot do that.

    NVLink multicast stays off.
    """
    os.putenv("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(device)
    backend: Any = torch.distributed.ProcessGroupNCCL
    group = backend(store, rank, size, backend.Options())
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group
