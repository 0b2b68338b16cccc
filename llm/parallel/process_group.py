"""`ProcessGroup`: ranks in processes of one machine, one process for each device.

    rank 0   the engine ── broadcast(step) ─┬─ forward ── all_reduce … all_gather ── sample
    rank 1   follows    ────────────────────┴─ forward ── all_reduce … all_gather ── sample

Values of the host use gloo. Tensors use gloo on CPUs, and NCCL on GPUs.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm.errors import ConfigError
from llm.parallel.group import Group

START_TIMEOUT = timedelta(minutes=10)  # of the ranks to find each other
WAIT_TIMEOUT = timedelta(days=365)  # between steps; a rank that ends closes its connections


class ProcessGroup(Group):
    """One rank of several processes that meet at a file."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device) -> None:
        """Wait for all ranks. `meeting` is a file that no earlier group has used.

        Raises `RuntimeError` when a rank does not come.
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
        self._buffers: list[Tensor] = []

    def all_reduce(self, partial: Tensor) -> Tensor:
        """See `Group`.

        On CPUs the sum is taken in the order of ranks, so that an element does not depend on its
        place in the tensor.
        """
        if self._device.type == "cuda":
            self._tensors.allreduce([partial]).wait()
            return partial
        first, *others = self._gathered(partial)
        for other in others:
            first.add_(other)
        return first

    def all_gather(self, shard: Tensor) -> Tensor:
        """See `Group`."""
        return torch.cat(self._gathered(shard), dim=-1)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of every rank."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._tensors.allgather([found], [tensor]).wait()
        return found

    def broadcast(self, value: Any) -> Any:
        """See `Group`."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._host.broadcast(length, 0).wait()
        if self.rank > 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._host.broadcast(data, 0).wait()
        return value if self.rank == 0 else pickle.loads(data.numpy().tobytes())

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


def _gloo(store: Any, rank: int, size: int) -> Any:
    """Create the backend of host tensors, which only connects to processes of this machine."""
    backend = torch.distributed.ProcessGroupGloo
    options = backend._Options()
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    options._timeout = WAIT_TIMEOUT
    return backend(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Create the backend of a GPU's tensors, and connect: a captured graph cannot do that."""
    torch.cuda.set_device(device)
    backend = torch.distributed.ProcessGroupNCCL
    group = backend(store, rank, size, backend.Options())
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group
