"""An event loop on a virtual clock, which advances only while the loop is idle.

Timers run in order and at once, however busy the machine is. For work that stays on one thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

LATE_S = 1e-6  # timers are never early, so a remaining time computed in a callback is 0

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait for its next timer but sets its clock to it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None:
            self._loop.now_s += timeout + LATE_S
        return found


def run_virtually(
    work: Coroutine[Any, Any, Result], module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Result:
    """Run a coroutine on such a loop; the module reads the same clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        clock = SimpleNamespace(monotonic=runner.get_loop().time)
        monkeypatch.setattr(module, "time", clock)
        return runner.run(asyncio.wait_for(work, 60))
