"""Admission by a process without a model: limits over all front ends, and no work."""

from __future__ import annotations

from contextlib import AsyncExitStack

import numpy as np
import pytest

from tests.tts.engine.jobs import in_slot, listen, read, run, speech, text
from tests.tts.ipc.remote_engine import new_base
from tts.config.server import ServerConfig
from tts.errors import NotAvailableError, ServerBusyError
from tts.ipc.endpoints import reserved
from tts.ipc.remote_admission import RemoteAdmission
from tts.ipc.remote_client import RemoteEngineClient
from tts.processes.shared_admission import shared_admission

LIMITS = ServerConfig(max_concurrent_requests=2, max_queued_requests=0)


def test_front_ends_share_the_limits_and_can_ask_for_nothing_else() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as ending:
            endpoints = ending.enter_context(reserved(new_base()))
            await ending.enter_async_context(shared_admission(LIMITS, endpoints))
            clients = [await RemoteEngineClient.connect(endpoints, f"front{n}") for n in range(2)]
            for client in clients:
                ending.push_async_callback(client.close)
            one, two = (RemoteAdmission([client]) for client in clients)
            async with in_slot(one, "a"), in_slot(two, "b"):
                with pytest.raises(ServerBusyError):
                    await in_slot(one, "c").__aenter__()
            async with in_slot(two, "c"):
                assert two.running == 1
            with pytest.raises(NotAvailableError):
                await listen(clients[0], speech("x"))
            with pytest.raises(NotAvailableError):
                await read(clients[0], text("x"))
            with pytest.raises(NotAvailableError):
                await clients[0].encode_prompt(np.zeros(9, np.float32))

    run(scenario)
