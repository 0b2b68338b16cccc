"""`InputBuffers`: all that captured forwards read of the host, sent to the device in one copy.

    | sampling records | ids | positions | slots | sampled tokens | attention's page tables … |

Where each of them lies depends on the shape of the forward alone, which a captured one knows. What
may be long comes last: of that no more is sent than a batch needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from llm.memory_staging import Section, StagedMemory, section_bytes

MAX_VIEWS = 1024  # of one shape's tokens


@dataclass(frozen=True, slots=True)
class InputSizes:
    """How many numbers of each kind the forward of one shape reads."""

    record_words: int  # of all rows
    num_tokens: int
    num_sampled: int
    table_words: int

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(section_bytes(size, dtype) for size, dtype in self.parts())

    def parts(self) -> list[tuple[int, torch.dtype]]:
        """In the order of `Inputs`."""
        longs = (self.num_tokens, self.num_tokens, self.num_tokens, self.num_sampled)
        words = torch.int32
        every = [(self.record_words, words), *((size, torch.int64) for size in longs)]
        return [*every, (self.table_words, words)]


class Inputs(NamedTuple):
    """What one captured forward reads."""

    records: Section  # int32 [rows × words] how its rows are sampled
    ids: Section  # int64 [T] places in the runner's table of tokens
    positions: Section  # int64 [T]
    slots: Section  # int64 [T]
    sampled: Section  # int64 [S] the tokens whose logits are wanted
    tables: Section  # int32, attention's


class TokenViews:
    """Ids, positions and slots of some of a forward's tokens; what was asked for is kept."""

    def __init__(self, ids: Tensor, inputs: Inputs) -> None:
        self._columns = (ids, inputs.positions.device, inputs.slots.device)
        self._kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def of(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Those of the tokens [first, last)."""
        found = self._kept.get((first, last))
        if found is None:
            if len(self._kept) >= MAX_VIEWS:
                self._kept.clear()
            found = tuple([column[first:last] for column in self._columns])
            self._kept[first, last] = found
        return found


class InputBuffers(StagedMemory):
    """Memory for one forward at a time, of up to `num_bytes` of inputs."""

    def inputs(self, sizes: InputSizes) -> Inputs:
        """The same memory every time."""
        start, sections = 0, []
        for size, dtype in sizes.parts():
            sections.append(self.section(start, size, dtype))
            start += section_bytes(size, dtype)
        return Inputs(*sections)
