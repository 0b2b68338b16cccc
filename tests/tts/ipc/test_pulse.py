"""Signs of life: when there are none any more, and when this process only did not look."""

from __future__ import annotations

import asyncio
import time

from tests.tts.jobs import run
from tts.ipc.pulse import LATE_S, Pulse

LIMIT_S = 0.2


def test_a_pulse_stops_when_no_sign_comes_for_too_long() -> None:
    async def scenario() -> None:
        pulse = Pulse(LIMIT_S)
        stopping = asyncio.create_task(pulse.stopped())
        await asyncio.sleep(2 * LIMIT_S)
        assert not stopping.done(), "it has not begun"
        for _ in range(5):
            pulse.felt()
            last_s = time.monotonic()
            await asyncio.sleep(LIMIT_S / 2)
            assert not stopping.done()
        await stopping
        assert time.monotonic() - last_s >= LIMIT_S

    run(scenario)


def test_signs_that_came_while_this_process_stood_still_count() -> None:
    async def scenario() -> None:
        pulse = Pulse(LIMIT_S)
        pulse.felt()
        stopping = asyncio.create_task(pulse.stopped())
        await asyncio.sleep(0)
        time.sleep(3 * (LIMIT_S + LATE_S))  # all of the process: nothing is read meanwhile
        asyncio.get_running_loop().call_later(LATE_S / 4, pulse.felt)
        await asyncio.sleep(LATE_S / 2)
        assert not stopping.done()
        await stopping

    run(scenario)
