"""A call that ends gRPC's server loop ends no server, however many processes it has."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.tts.processes.test_kills import channel_to, heard
from tests.tts.server_process import FRONT_END, processes_of, serving_process
from tests.tts.serving import health, run
from tests.tts.test_server_listener import Status, break_loop


@pytest.mark.parametrize("front_ends", [0, 1, 2])
def test_paths_that_are_no_text_close_no_server(tiny_checkpoint: Path, front_ends: int) -> None:
    """Many of them: each front end gets some, and none is started again for it."""

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
                    assert (await heard(channel)).data
                    assert await health(channel) == Status.SERVING
            assert processes_of(process, FRONT_END) == before
            process.process.send_signal(signal.SIGTERM)
            assert await process.ended(30) == 0

    run(scenario(), 110)
