"""`StatePool`: the tensors behind the slots of recurrent states, see `StateSlots`.

A layer's part of all states is one tensor [states, …]: for a short convolution the last inputs
[states, K - 1, channels]. Nothing is cleared when a slot changes hands: the first row of a sequence
reads the slot of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llm.batch import ForwardBatch
from llm.kv_cache.state_slots import ZERO_STATE, state_of
from llm.memory.transfer import to_device


@dataclass(frozen=True, slots=True)
class StatePart:
    """One kind of state, which `num_layers` layers have: `shape` without the number of states."""

    num_layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence in all layers."""
        return self.num_layers * math.prod(self.shape) * self.dtype.itemsize


def state_bytes(parts: Sequence[StatePart]) -> int:
    """Return the bytes of all parts of one sequence's state."""
    return sum(part.nbytes for part in parts)


class StatePool:
    """States of `num_states` slots, those for padding and for zeros included."""

    def __init__(
        self, parts: Sequence[StatePart], num_states: int, device: torch.device | str = "cpu"
    ) -> None:
        self.parts = tuple(parts)
        self.num_states = num_states
        self.device = torch.device(device)
        self._layers = [
            [
                torch.zeros(num_states, *part.shape, dtype=part.dtype, device=self.device)
                for _ in range(part.num_layers)
            ]
            for part in self.parts
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return self.num_states * state_bytes(self.parts)

    def layer(self, part: int, layer: int) -> Tensor:
        """Return all states [states, …] of one layer, to read and write."""
        return self._layers[part][layer]

    def __repr__(self) -> str:
        return f"StatePool({self.num_states} states, {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True, slots=True)
class StateRows:
    """Slots of the B rows of one forward, for all layers.

    Rows of one token each need no `lengths`: they are computed with the same operations for any B.
    """

    read: Tensor  # int64 [B] slots of the states before the forward
    written: Tensor  # int64 [B] slots of the states after it
    lengths: tuple[int, ...] | None  # [B] tokens of each row; None: one each

    @classmethod
    def of(cls, batch: ForwardBatch) -> StateRows:
        """Find the slots of a batch's rows. Raises `ValueError` for page tables without a state."""
        lengths = None if max(batch.query_lens, default=1) == 1 else batch.query_lens
        if batch.states is not None:
            read, written = batch.states
            return cls(read, written, lengths)
        slots = state_slots(batch.pages, batch.context_lens, batch.query_lens)
        numbers = to_device(torch.from_numpy(slots), batch.positions.device)
        return cls(numbers[0], numbers[1], lengths)


def state_slots(
    pages: Sequence[Sequence[int]], context_lens: Sequence[int], query_lens: Sequence[int]
) -> np.ndarray:
    """Return int64 [2, B]: the slots that the rows read, and those that they write.

    Raises `ValueError` for page tables without a state.
    """
    written = [state_of(table) for table in pages]
    places = zip(written, context_lens, query_lens, strict=True)
    read = [ZERO_STATE if length == fed else slot for slot, length, fed in places]
    return np.array([read, written], dtype=np.int64)
