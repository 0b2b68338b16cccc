"""A call that ends gRPC's server loop does not end a server with several processes."""

from __future__ import annotations

from tests.tts.processes.test_kills import channel_to, synthesize_on
from tests.tts.server.test_listener import Status, break_loop
from tests.tts.server_process import FRONT_END, Killable, Shared, processes_of
from tests.tts.serving import health


def test_invalid_paths_end_no_server_process(killable: Shared[Killable]) -> None:
    """Each front end gets several such calls, and none is restarted."""

    async def scenario() -> None:
        process, address = killable.value.process, killable.value.address
        before = processes_of(process, FRONT_END)
        assert len(before) == 2
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

    killable.run(scenario())
