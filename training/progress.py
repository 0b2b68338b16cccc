"""Parts of a training run on one device: its time, its learning rate, the mean of its weights."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

FIRST_LOGGED = (1, 20)  # steps

NetworkT = TypeVar("NetworkT", bound=nn.Module)


class Mean(Generic[NetworkT]):
    """Running mean of the weights of a network, in a copy of it for use.

    Every `every` steps it moves by `share` towards the newest weights, and by more at first: the
    first weights are soon forgotten.
    """

    def __init__(self, network: NetworkT, every: int, share: float) -> None:
        self.network = copy.deepcopy(network).eval().requires_grad_(requires_grad=False)
        self._every, self._share = every, share
        self._kept, self._newest = _values(self.network), _values(network)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Call after every step with the number of steps so far."""
        if step % self._every == 0:
            weight = max(self._share, min(0.5, self._every / step))
            torch._foreach_lerp_(self._kept, self._newest, weight)


def _values(network: nn.Module) -> list[Tensor]:
    parameters = [value.detach() for value in network.parameters()]
    return [*parameters, *(b for b in network.buffers() if b.is_floating_point())]


class Rate(NamedTuple):
    """A learning rate that rises for `warm_steps`, then falls to a share of the highest."""

    highest: float
    warm_steps: int
    last: float

    def set(self, step: int, share: float, *optimisers: torch.optim.Optimizer) -> None:
        """Set the rate of the step after `step` others, at this share of the run."""
        rate = self.highest * min(1.0, (step + 1) / self.warm_steps)
        rate *= 1 - (1 - self.last) * share
        for optimiser in optimisers:
            for settings in optimiser.param_groups:
                if isinstance(settings["lr"], Tensor):  # that a recorded step reads
                    settings["lr"].fill_(rate)
                else:
                    settings["lr"] = rate


class Clock:
    """Seconds since the start of a run, with a log line."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._began

    def log(self, *parts: object) -> None:
        print(f"[{self.now():7.1f}]", *parts, flush=True)


class Deadline:
    """Elapsed share of a run: of its time, from now to `until` on the clock, or of its steps."""

    def __init__(self, clock: Clock, until: float, steps: int = 0) -> None:
        """`steps`: at most, 0: as time allows."""
        self._clock, self._steps, self._began = clock, steps, clock.now()
        self._whole_s = max(until - self._began, 1e-3)

    def share(self, step: int) -> float:
        """Return 0 … 1 before the next step."""
        of_time = (self._clock.now() - self._began) / self._whole_s
        of_steps = step / self._steps if self._steps else 0.0
        return min(1.0, max(of_time, of_steps))


class Progress:
    """Steps of a run until its minutes or its steps are over, with a clock and a log."""

    def __init__(self, minutes: float, steps: int, log_s: float) -> None:
        """`steps`: at most, 0: as time allows. `log_s`: seconds between lines of the log."""
        self.clock, self.step = Clock(), 0
        self._deadline = Deadline(self.clock, self.clock.now() + 60 * minutes, steps)
        self._log_s, self._logged, self._last = log_s, self.clock.now(), 0

    def __iter__(self) -> Iterator[float]:
        """Iterate over the shares of the run that are over before each step."""
        while (share := self._deadline.share(self.step)) < 1:
            yield share
            self.step += 1

    def log_losses(self, seen: Mapping[str, Tensor]) -> bool:
        """Print the losses of the current step, if it is time to, and return whether it was."""
        now, step = self.clock.now(), self.step + 1
        due = now - self._logged > self._log_s or step in FIRST_LOGGED
        if due:
            values = " ".join(f"{name} {value.item():.4f}" for name, value in seen.items())
            pace_ms = 1e3 * (now - self._logged) / (step - self._last)
            self.clock.log(f"step {step} {values} {pace_ms:.0f} ms")
            self._logged, self._last = now, step
        return due


class Trainer(Protocol):
    """Training with a step, weights to save and a figure of what is held out."""

    def train_step(self, step: int, share: float) -> Mapping[str, Tensor]:
        """Return the losses of the step after `step` others, at this share of the run."""

    def save(self) -> None:
        """Write what is kept."""

    def held_out(self) -> str:
        """Return a line about what is not learned from."""


def run_to_the_end(trainer: Trainer, progress: Progress) -> None:
    """Train until the time is over, save, and log what is held out."""
    for share in progress:
        progress.log_losses(trainer.train_step(progress.step, share))
    trainer.save()
    progress.clock.log(f"{trainer.held_out()} after {progress.step} steps")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all trainings have."""
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--steps", type=int, default=0, help="at most; 0: as time allows")
    parser.add_argument("--log", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
