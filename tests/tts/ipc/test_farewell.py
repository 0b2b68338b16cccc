"""The engine's last message: what runs on it ends then, without a lost connection or silence."""

from __future__ import annotations

import asyncio

import pytest

from tests.tts.ipc.hop import hop
from tests.tts.jobs import listen, run, speech
from tests.tts.ramp import RampClient
from tts.errors import EngineLostError
from tts.ipc import link


def test_an_engine_that_ends_says_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a process no connection is lost, and silence counts for nothing here: the message
    is all that tells.
    """
    monkeypatch.setattr(link, "STALL_S", 3600)

    async def scenario() -> None:
        engine = RampClient()
        engine.gate.clear()
        async with hop(engine, "inproc://engine") as served:
            running = asyncio.ensure_future(listen(served.client, speech("x")))
            while not engine.num_open:
                await asyncio.sleep(0.005)
            await served.server.close()
            with pytest.raises(EngineLostError):
                await running
            assert not (await served.client.status()).is_alive

    run(scenario)
