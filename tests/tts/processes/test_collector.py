"""Garbage collection in a serving process: loaded objects are frozen, cycles are collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tts.cli.program import YOUNG_OBJECTS
from tts.processes.collector import tune_gc


class Node:
    """An object that can be part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Return the thresholds before the test and restore them after it.

    What is frozen stays so: that are also the modules and tests, see `tests/conftest.py`.
    """
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_loaded_objects_are_frozen_and_cycles_are_collected(
    thresholds: tuple[int, int, int],
) -> None:
    loaded = Node()
    gc.disable()
    tune_gc()
    assert gc.isenabled()
    assert gc.get_threshold() == (YOUNG_OBJECTS, *thresholds[1:])
    assert not any(found is loaded for found in gc.get_objects())
    garbage = weakref.ref(Node())
    while garbage() is not None:
        keep = [Node() for _ in range(1000)]
        assert len(keep) == 1000
