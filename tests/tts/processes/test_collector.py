"""Garbage collection in a serving process: loaded objects are frozen, cycles are collected."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from tts.cli.program import YOUNG_OBJECTS
from tts.processes import collector
from tts.processes.collector import collect_regularly, tune_gc


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


@pytest.mark.parametrize("is_old", [False, True])
def test_garbage_is_collected_by_time(
    is_old: bool, thresholds: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Young garbage soon; that which outlived a collection by the next full one."""
    monkeypatch.setattr(collector, "YOUNG_S", 0.01)
    monkeypatch.setattr(collector, "PASSES", 5 if is_old else 10**9)
    gc.set_threshold(10**9, *thresholds[1:])
    node: Node | None = Node()
    found = weakref.ref(node)
    if is_old:
        gc.collect(0)
    node = None

    async def wait() -> None:
        collect_regularly(asyncio.get_running_loop())
        while found() is not None:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(wait(), 60))
