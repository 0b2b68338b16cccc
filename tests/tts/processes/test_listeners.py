"""A call that ends gRPC's server loop does not end a server with several processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server.test_listener import Status, break_loop
from tests.tts.server_process import FRONT_END, processes_of, serving_process
from tests.tts.serving import health, run


@pytest.mark.parametrize("front_ends", [0, 2])
def test_invalid_paths_end_no_server_process(tiny_checkpoint: Path, front_ends: int) -> None:
    """Each front end gets several such calls, and none is restarted."""

    async def scenario() -> None:
        async with serving_process(tiny_checkpoint, front_ends=front_ends) as process:
            address = await process.ready()
            before = processes_of(process, FRONT_END)
            for _ in range(20):
                try:
                    await break_loop(address)
                except ConnectionError:
                    continue  # refused in the moment after the one before
            for _ in range(8):  # the kernel spreads them over the front ends
                async with channel_to(address) as channel:
                    assert (await synthesize_on(channel)).data
                    assert await health(channel) == Status.SERVING
            assert processes_of(process, FRONT_END) == before
            process.process.send_signal(signal.SIGTERM)
            assert await process.ended(30) == 0

    run(scenario())
