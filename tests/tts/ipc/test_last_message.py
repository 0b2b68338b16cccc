"""The engine's last message ends its requests without a lost connection or a timeout."""

from __future__ import annotations

import asyncio

import pytest

from tests.tts.engine.jobs import listen, run, speech
from tests.tts.ipc.remote_engine import remote_engine
from tests.tts.ramp import RampClient
from tts.errors import EngineLostError
from tts.ipc import link


def test_an_engine_that_ends_sends_a_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a process no connection is lost, and the timeout is an hour here: the message
    is the only sign of the end.
    """
    monkeypatch.setattr(link, "STALL_S", 3600)

    async def scenario() -> None:
        engine = RampClient()
        engine.gate.clear()
        async with remote_engine(engine, "inproc://engine") as served:
            running = asyncio.ensure_future(listen(served.client, speech("x")))
            while not engine.num_open:
                await asyncio.sleep(0.005)
            await served.server.close()
            with pytest.raises(EngineLostError):
                await running
            assert not (await served.client.status()).is_alive

    run(scenario)
