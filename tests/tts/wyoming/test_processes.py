"""Wyoming on a server of several processes: one port, a killed engine, a drain."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tests.speech_server import READY
from tests.tts.server_process import ENGINE, Killable, Shared, processes_of, serving_process
from tests.tts.serving import TEXT, run
from tests.tts.wyoming.client import Client, Event, pcm

LONG_TEXT = " ".join([TEXT] * 40)
RETRY_S = 0.2


def port_of(address: str) -> int:
    return int(address.removeprefix("127.0.0.1:"))


async def connect(port: int) -> Client:
    return Client(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))


async def speak(port: int) -> list[Event]:
    """Return the events of a text, the last of which is audio-stop or an error."""
    client = await connect(port)
    await client.send("synthesize", text=TEXT, seed=7)
    events: list[Event] = []
    while not events or events[-1].type not in ("audio-stop", "error"):
        event = await client.read()
        assert event is not None
        events.append(event)
    await client.close()
    return events


def test_front_ends_share_the_port_and_survive_their_engine(killable: Shared[Killable]) -> None:
    async def scenario() -> None:
        port = port_of(killable.value.wyoming)
        spoken = await asyncio.gather(*(speak(port) for _ in range(8)))
        assert len({pcm(events) for events in spoken}) == 1
        assert pcm(spoken[0])
        client = await connect(port)
        await client.send("synthesize", text=LONG_TEXT)
        await client.until("audio-chunk")
        (engine,) = processes_of(killable.value.process, ENGINE)
        os.kill(engine, signal.SIGKILL)
        error = await client.last()
        assert (error.type, error.data["code"]) == ("error", "ENGINE_LOST")
        await client.close()
        again = await speak(port)
        while again[-1].type == "error":
            assert again[-1].data["code"] == "ENGINE_LOST"
            await asyncio.sleep(RETRY_S)
            again = await speak(port)
        assert pcm(again) == pcm(spoken[0])

    killable.run(scenario())


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
