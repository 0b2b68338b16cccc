"""Data-parallel training by averaging gradients: one process per GPU, or a single process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

LOOK_EVERY_S = 1.0


class Group:
    """Ranks of one training job. Without WORLD_SIZE in the environment: a group of one."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.is_cuda = torch.cuda.is_available()
        self.device = torch.device("cpu")
        if self.is_cuda:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            backend = "nccl" if self.is_cuda else "gloo"
            dist.init_process_group(backend, timeout=timedelta(minutes=20))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average every gradient over the ranks, in one flat message."""
        if self.size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= self.size
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(piece.view_as(grad))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to all ranks."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def agree(self, value: float) -> float:
        """Return rank 0's number on every rank (deadlines, stage decisions)."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return float(box)

    def close(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


class Deadline:
    """Elapsed share of a stage's time and steps, equal on all ranks.

    The time is checked about every second: `begun` to `until` on the clock.
    """

    def __init__(self, clock: Clock, group: Group, until: float, steps: int = 0) -> None:
        self._clock, self._group, self._steps = clock, group, steps
        self._began = self._last = group.agree(clock.now())
        self._whole_s = max(group.agree(until) - self._began, 1e-3)
        self._share, self._step, self._next, self._stride = 0.0, 0, 0, 1

    @property
    def has_passed(self) -> bool:
        return self._share >= 1

    def share(self, step: int) -> float:
        """Return 0 … 1 before the next step; the same on every rank."""
        if step >= self._next:
            now = self._group.agree(self._clock.now())
            pace_s = (now - self._last) / max(1, step - self._step)
            self._stride = min(max(1, int(LOOK_EVERY_S / max(pace_s, 1e-6))), 2 * self._stride)
            self._last, self._step, self._next = now, step, step + self._stride
            self._share = max(self._share, (now - self._began) / self._whole_s)
        if self._steps:
            self._share = max(self._share, step / self._steps)
        return min(1.0, self._share)


class Clock:
    """Seconds since the recipe started (environment RECIPE_START, else now), with a log line."""

    def __init__(self) -> None:
        self.start = float(os.environ.get("RECIPE_START", time.time()))

    def now(self) -> float:
        return time.time() - self.start

    def log(self, *parts: object) -> None:
        print(f"[{self.now():7.1f}]", *parts, flush=True)
