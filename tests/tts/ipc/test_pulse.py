"""Signs of life: when there are none any more, and when this process only did not look."""

from __future__ import annotations

import asyncio

import pytest

from tests.tts.virtual_time import VirtualLoop, run_virtually
from tts.ipc import pulse as module
from tts.ipc.pulse import LATE_S, Pulse

LIMIT_S = 0.2


def test_a_pulse_stops_when_no_sign_comes_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        pulse = Pulse(LIMIT_S)
        stopping = asyncio.create_task(pulse.stopped())
        await asyncio.sleep(2 * LIMIT_S)
        assert not stopping.done(), "it has not begun"
        for _ in range(5):
            pulse.felt()
            last_s = asyncio.get_running_loop().time()
            await asyncio.sleep(LIMIT_S / 2)
            assert not stopping.done()
        await stopping
        silent_s = asyncio.get_running_loop().time() - last_s
        assert LIMIT_S <= silent_s <= LIMIT_S + 2 * LATE_S

    run_virtually(scenario(), module, monkeypatch)


def test_signs_that_came_while_this_process_stood_still_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        pulse = Pulse(LIMIT_S)
        pulse.felt()
        stopping = asyncio.create_task(pulse.stopped())
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.now_s += 3 * (LIMIT_S + LATE_S)  # all of the process: nothing is read meanwhile
        loop.call_later(LATE_S / 4, pulse.felt)
        await asyncio.sleep(LATE_S / 2)
        assert not stopping.done()
        await stopping

    run_virtually(scenario(), module, monkeypatch)
