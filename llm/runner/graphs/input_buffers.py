"""`InputBuffers`: all host inputs of captured forwards, sent to the device in one copy.

    | sampling records | ids | positions | slots | sampled | states | needed | page tables … |

The offset of each part depends only on the shape of the forward. The part that may be long comes
last, so that only the portion that a batch uses is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llm.memory.staging import Section, StagedMemory, section_bytes

MAX_VIEWS = 1024  # number of cached views of one shape's tokens


@dataclass(frozen=True, slots=True)
class InputSizes:
    """Number of elements of each kind that the forward of one shape reads."""

    record_words: int  # for all rows
    num_tokens: int
    num_sampled: int
    table_words: int
    ids_per_token: int = 1
    num_states: int = 0  # that are read, and as many that are written

    @property
    def num_bytes(self) -> int:
        """Size of all parts."""
        return sum(section_bytes(size, dtype) for size, dtype in self.parts())

    def parts(self) -> list[tuple[int, torch.dtype]]:
        """Return sizes and formats in the order of `Inputs`."""
        num_ids = self.num_tokens * self.ids_per_token
        longs = (num_ids, self.num_tokens, self.num_tokens, self.num_sampled, 2 * self.num_states)
        words = torch.int32
        every = [(self.record_words, words), *((size, torch.int64) for size in longs)]
        return [*every, (2, words), (self.table_words, words)]


class Inputs(NamedTuple):
    """Inputs of one captured forward."""

    records: Section  # int32 [rows × words] how its rows are sampled
    ids: Section  # int64 [T] positions in the runner's table of tokens, or [T × K] codes
    positions: Section  # int64 [T]
    slots: Section  # int64 [T]
    sampled: Section  # int64 [S] the tokens whose logits are computed
    states: Section  # int64 [2 × B] slots of recurrent states that are read, and written
    needed: Section  # int32 [2] the range of ids whose logits are needed
    tables: Section  # int32, page tables for attention


class TokenViews:
    """Cached views of ids, positions and slots of ranges of a forward's tokens."""

    def __init__(self, ids: Tensor, inputs: Inputs) -> None:
        self._columns = (ids, inputs.positions.device, inputs.slots.device)
        self._kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def of(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Return the views of the tokens [first, last)."""
        found = self._kept.get((first, last))
        if found is None:
            if len(self._kept) >= MAX_VIEWS:
                self._kept.clear()
            found = tuple([column[first:last] for column in self._columns])
            self._kept[first, last] = found
        return found


class InputBuffers(StagedMemory):
    """Memory for the inputs of one forward at a time, up to `num_bytes`."""

    def inputs(self, sizes: InputSizes) -> Inputs:
        """Return the inputs, which share the same memory for every shape."""
        start, sections = 0, []
        for size, dtype in sizes.parts():
            sections.append(self.section(start, size, dtype))
            start += section_bytes(size, dtype)
        return Inputs(*sections)
