"""`LoRAManager`: every adapter on the host, those in use in the slots of the device.

    start      read all of `lora_paths`; the model's layers register as targets
    a forward  begin(adapter of each row, tokens of each row): missing adapters are loaded into
               free slots, else into the least recently used one; `groups` has the tokens of
               each slot

The scheduler runs at most `max_num_loras` adapters at once, so that there is always a slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llm.config import LoRAConfig
from llm.errors import CheckpointError, RequestError
from llm.lora.adapter import LoRAAdapter, LoRAFactors, adapter_bytes
from llm.memory.transfer import to_device
from llm.request import Request


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Tokens of a forward that use one slot: int64 [n], or None for all of them."""

    slot: int
    tokens: Tensor | None


class AdapterTarget(Protocol):
    """A layer that can be adapted."""

    def load(self, slot: int, factors: Mapping[str, LoRAFactors]) -> None:
        """Load an adapter's factors into a slot, in place of the previous ones."""


class LoRAManager:
    """Adapters of one model on one device. Used from the engine's thread, except `admit`."""

    def __init__(self, config: LoRAConfig, device: torch.device) -> None:
        """Read the adapters. Raises `CheckpointError` and `ConfigError` for unsupported ones."""
        self._device = device
        self._max_num_loras = config.max_num_loras
        self._adapters = {
            name: LoRAAdapter.read(name, folder, config.max_lora_rank)
            for name, folder in config.adapters().items()
        }
        self._targets: list[AdapterTarget] = []
        self._claimed: set[str] = set()
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.groups: tuple[RowGroup, ...] = ()  # of the current forward
        self.num_loads = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._adapters)

    @property
    def resident(self) -> tuple[str, ...]:
        """Adapters in slots, least recently used first."""
        return tuple(self._slots)

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for an unknown adapter. Thread-safe."""
        if request.lora and request.lora not in self._adapters:
            known = ", ".join(self._adapters) or "none"
            raise RequestError(f"no adapter '{request.lora}'; there are: {known}")

    def adapts(self, module: str) -> bool:
        """Whether an adapter changes this module of the checkpoint."""
        return any(module in adapter.factors for adapter in self._adapters.values())

    def claim(self, target: AdapterTarget, modules: Mapping[str, tuple[int, int]]) -> None:
        """Register a layer that computes these modules, each of shape (out, in).

        Raises `CheckpointError` for an adapter whose factors have other shapes.
        """
        for adapter in self._adapters.values():
            for module, (num_out, num_in) in modules.items():
                factors = adapter.factors.get(module)
                if factors is None:
                    continue
                found = (len(factors.up), factors.down.shape[1])
                if found != (num_out, num_in):
                    raise CheckpointError(
                        f"adapter '{adapter.name}' has {module} as {found}, "
                        f"the model as {(num_out, num_in)}"
                    )
        self._targets.append(target)
        self._claimed.update(modules)

    def check_claimed(self) -> None:
        """Raise `CheckpointError` for an adapter with modules that no layer computes."""
        for adapter in self._adapters.values():
            lost = sorted(adapter.factors.keys() - self._claimed)
            if lost:
                more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
                names = ", ".join(lost[:3])
                raise CheckpointError(
                    f"adapter '{adapter.name}' has modules that cannot be adapted: {names}{more}"
                )

    def begin(self, names: Sequence[str], query_lens: Sequence[int]) -> None:
        """Prepare a forward: the adapter ('' for none) and the number of tokens of each row."""
        wanted = dict.fromkeys(name for name in names if name)
        if not wanted:
            self.groups = ()
            return
        for name in wanted:
            self._make_resident(name, wanted)
        if len(wanted) == 1 and all(names):
            self.groups = (RowGroup(self._slots[names[0]], None),)
            return
        owners = torch.tensor([self._slots.get(name, -1) if name else -1 for name in names])
        by_token = owners.repeat_interleave(torch.tensor(query_lens))
        self.groups = tuple(
            RowGroup(slot, to_device((by_token == slot).nonzero().flatten(), self._device))
            for slot in (self._slots[name] for name in wanted)
        )

    def _make_resident(self, name: str, wanted: Mapping[str, None]) -> None:
        if name not in self._slots:
            slot = self._free_slot(wanted)
            for target in self._targets:
                target.load(slot, self._adapters[name].factors)
            self._slots[name] = slot
            self.num_loads += 1
        self._slots.move_to_end(name)

    def _free_slot(self, wanted: Mapping[str, None]) -> int:
        if len(self._slots) < self._max_num_loras:
            return len(self._slots)
        victim = next((name for name in self._slots if name not in wanted), None)
        if victim is None:
            raise RuntimeError(f"{len(wanted)} adapters in one batch, {self._max_num_loras} slots")
        return self._slots.pop(victim)


def reserved_bytes(config: LoRAConfig | None) -> int:
    """Return the bytes of all slots on the device, each with the size of the largest adapter."""
    if config is None or not config.enable_lora:
        return 0
    sizes = [adapter_bytes(Path(folder)) for folder in config.adapters().values()]
    return min(config.max_num_loras, len(sizes)) * max(sizes, default=0)
