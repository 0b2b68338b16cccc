"""A killed engine ends the running calls of every protocol, and serves all of them again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import grpc
import httpx

from tests.deadlines import HANG_S
from tests.tts.http.http_serving import SPEECH, error_of
from tests.tts.http.test_http_faults import LONG
from tests.tts.riva.requests import request
from tests.tts.server_process import ENGINE, FRONT_END, Killable, Process, Shared, processes_of
from tests.tts.serving import TEXT, error_of_reading, reason_of
from tests.tts.wyoming.client import Client, Event, pcm
from tests.tts.wyoming.test_processes import connect, port_of
from tts.riva.stubs.tts_pb2_grpc import RivaSpeechSynthesisStub

RETRY_S = 0.2
LONG_TEXT = " ".join([TEXT] * 40)
BODY: dict[str, Any] = {"input": "hello", "seed": 1, "response_format": "pcm"}


def http_client(killable: Killable) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{killable.http}", timeout=HANG_S, verify=False)


async def speak(port: int) -> list[Event]:
    """Return Wyoming's events of a text, the last of which is audio-stop or an error."""
    client = await connect(port)
    await client.send("synthesize", text=TEXT, seed=7)
    events: list[Event] = []
    while not events or events[-1].type not in ("audio-stop", "error"):
        event = await client.read()
        assert event is not None
        events.append(event)
    await client.close()
    return events


def test_calls_of_a_killed_engine(killable: Shared[Killable]) -> None:
    """Over HTTP, Wyoming and Riva, each with audio before; then a front end is killed, too."""

    async def scenario() -> None:
        server = killable.value
        process, port = server.process, port_of(server.wyoming)
        spoken = await asyncio.gather(*(speak(port) for _ in range(8)))
        assert len({pcm(events) for events in spoken}) == 1
        assert pcm(spoken[0])
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(http_client(server))
            expected = (await client.post(SPEECH, json=BODY)).content
            assert expected
            wyoming = await begin_wyoming(port)
            channel = await opened.enter_async_context(grpc.aio.insecure_channel(server.address))
            riva = RivaSpeechSynthesisStub(channel).SynthesizeOnline()
            await riva.write(request(LONG_TEXT, max_tokens=None))
            assert (await riva.read()).audio
            streamed = {**LONG, "stream_format": "sse"}
            response = await opened.enter_async_context(
                client.stream("POST", SPEECH, json=streamed)
            )
            lines = response.aiter_lines()
            assert await anext(lines)
            (engine,) = processes_of(process, ENGINE)
            with stopped(process):
                os.kill(engine, signal.SIGKILL)
                last = [line async for line in lines if line][-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
                refused = await client.post(SPEECH, json=BODY)
                assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_lost")
                assert refused.headers["retry-after"]
                while (await client.get("/health")).status_code != 503:
                    await asyncio.sleep(0.05)
                error = await error_of_reading(riva)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "ENGINE_LOST"
                event = await wyoming.last()
                assert (event.type, event.data["code"]) == ("error", "ENGINE_LOST")
                await wyoming.close()
                refusal = (await speak(port))[-1]
                assert (refusal.type, refusal.data["code"]) == ("error", "ENGINE_LOST")
        os.kill(processes_of(process, FRONT_END)[0], signal.SIGKILL)
        assert await spoken_again(server) == expected
        again = await speak(port)
        while again[-1].type == "error":
            assert again[-1].data["code"] in ("ENGINE_LOST", "LOADING")  # of the new front end
            await asyncio.sleep(RETRY_S)
            again = await speak(port)
        assert pcm(again) == pcm(spoken[0])

    killable.run(scenario())


@contextmanager
def stopped(supervisor: Process) -> Iterator[None]:
    """Stop the supervisor, which starts no process meanwhile."""
    os.kill(supervisor.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(supervisor.process.pid, signal.SIGCONT)


async def begin_wyoming(port: int) -> Client:
    """Return a connection with a long text whose audio has begun."""
    client = await connect(port)
    await client.send("synthesize", text=LONG_TEXT)
    await client.until("audio-chunk")
    return client


async def spoken_again(server: Killable) -> bytes:
    """Return the speech of a request on a connection of its own that reaches a front end."""
    while True:
        with suppress(httpx.TransportError):
            async with http_client(server) as client:
                response = await client.post(SPEECH, json=BODY)
            if response.status_code == 200:
                return response.content
        await asyncio.sleep(RETRY_S)
