"""Wyoming on a server that drains."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.speech_server import READY
from tests.tts.server_process import serving_process
from tests.tts.serving import TEXT, run
from tests.tts.wyoming.client import Client


def port_of(address: str) -> int:
    return int(address.removeprefix("127.0.0.1:"))


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))


def test_a_running_text_is_spoken_to_its_end_when_the_server_drains(tiny_checkpoint: Path) -> None:
    """All in one process. New requests are refused meanwhile, and idle connections are closed."""

    async def scenario() -> None:
        async with serving_process(tiny_checkpoint, wyoming_port=0, front_ends=0) as process:
            ready = READY.match(await process.line())
            assert ready, process.log
            port = port_of(ready[3])
            client, late, idle = [await connect(port) for _ in range(3)]
            await client.send("synthesize", text=" ".join([TEXT] * 10))
            await client.until("audio-chunk")
            process.process.send_signal(signal.SIGTERM)
            await process.logged("draining")
            await late.send("describe")
            assert (await late.last()).data["code"] == "DRAINING"
            await late.close()
            await client.until("audio-stop")
            await client.close()
            assert await idle.read() is None
            await idle.close()
            assert await process.ended() == 0, process.log

    run(scenario())
