"""Garbage in a process that serves: what was loaded is left alone, cycles are still found."""

from __future__ import annotations

import gc
import weakref

from benchmarks.scheduler import calm
from tts.collector import YOUNG_OBJECTS


class Node:
    """Something that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_what_lives_is_left_alone_and_cycles_are_found() -> None:
    before, loaded = gc.get_threshold(), Node()
    with calm():
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        assert not any(found is loaded for found in gc.get_objects())
        garbage = weakref.ref(Node())
        while garbage() is not None:
            keep = [Node() for _ in range(1000)]
            assert len(keep) == 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
