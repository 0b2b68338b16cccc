"""`StateSlots`: which sequences hold a recurrent state, for models that have states next to pages.

    slot 0      padding: written by rows that belong to no sequence
    slot 1      zeros: never written; what a sequence reads before its first token
    slot 2 …    one for each sequence that holds pages

A claim of pages includes a slot, and its page table, a `StatePages`, has the slot's number with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from llm.errors import ConfigError

PADDING_STATE = 0
ZERO_STATE = 1
FIRST_STATE = 2


class StatePages(array):  # no type argument: Python 3.11 has none for it at run time
    """Page table of a sequence with a recurrent state."""

    state: int
    """Slot of the state."""

    @classmethod
    def of(cls, pages: Iterable[int], state: int) -> StatePages:
        """Create a page table."""
        made = cls("i", pages)
        made.state = state
        return made


def state_of(pages: Sequence[int]) -> int:
    """Return the slot of a page table's state; the padding slot for pages of padding.

    Raises `ValueError` for any other page table without a state.
    """
    if isinstance(pages, StatePages):
        return pages.state
    if any(pages):
        raise ValueError("a model with recurrent states needs page tables with a state each")
    return PADDING_STATE


class StateSlots:
    """The slots of a pool of `num_states` states, those for padding and for zeros included."""

    def __init__(self, num_states: int) -> None:
        if num_states <= FIRST_STATE:
            raise ConfigError(f"num_states={num_states} must be at least {FIRST_STATE + 1}")
        self._free = list(range(num_states - 1, FIRST_STATE - 1, -1))
        self.total_states = len(self._free)
        """States that sequences can hold."""

    @property
    def free_states(self) -> int:
        """Number of states that no sequence holds."""
        return len(self._free)

    def alloc(self) -> int:
        """Take a slot. The caller has checked `free_states`."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Return a slot. Raises `ValueError` for one that is not taken."""
        if slot in self._free or not FIRST_STATE <= slot < FIRST_STATE + self.total_states:
            raise ValueError(f"state {slot} is not taken")
        self._free.append(slot)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise `AssertionError` unless each slot is free or has exactly one of these holders."""
        slots = sorted([*held, *self._free])
        if slots != list(range(FIRST_STATE, FIRST_STATE + self.total_states)):
            raise AssertionError(f"{self!r}: held and free are {slots}")

    def __repr__(self) -> str:
        used = self.total_states - self.free_states
        return f"{used} of {self.total_states} states in use"
