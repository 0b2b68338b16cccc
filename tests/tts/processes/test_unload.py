"""Real engines that exit when they are idle, and are started again by the next call."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.speech_server import Server
from tests.tts.processes.test_kills import channel_to, synthesize_on, until
from tests.tts.server.test_text_service import generation
from tests.tts.server_process import (
    ENGINE,
    FRONT_END,
    Process,
    Shared,
    processes_of,
    serving_process,
    shared,
)
from tests.tts.serving import (
    error_of,
    grouped,
    health,
    run,
    say,
    session_config,
    stream_request,
)
from tts.config.server import ServerConfig
from tts.v1 import text_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub
from tts.v1.text_pb2_grpc import TextServiceStub

SERVING = health_pb2.HealthCheckResponse.SERVING
IDLE_S = 1


@asynccontextmanager
async def unloading(
    checkpoint: Path, **flags: object
) -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
    """Run a server that unloads its models soon, and a channel to it; then let it drain."""
    async with (
        serving_process(checkpoint, unload_after_s=IDLE_S, **flags) as process,
        channel_to(await process.ready()) as channel,
    ):
        yield process, channel
        process.process.terminate()
        assert await process.ended() == 0


Unloading = Shared[tuple[Process, grpc.aio.Channel]]


@pytest.fixture(scope="module")
def unloader(tiny_checkpoint: Path) -> Iterator[Unloading]:
    """A server with two front ends, which every test leaves usable: loaded or unloaded."""
    exported = {"prometheus_metrics_mode": "launch_multiproc_server", "metrics_port": 0}
    with shared(unloading(tiny_checkpoint, front_ends=2, **exported)) as server:
        yield server


async def until_unloaded(process: Process) -> None:
    async def is_gone() -> bool:
        return not processes_of(process, ENGINE)

    await until(is_gone)


def resident_bytes(process: Process) -> int:
    """Return the resident memory of all processes of a server."""
    return Server("", process.process.pid).resident_bytes()


async def gauge(url: str, name: str) -> float:
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    lines = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(lines[0].split()[1])


async def calls_of_all_kinds(channel: grpc.aio.Channel) -> list[bytes | str]:
    """Return the results of calls at once: four conversations, then four texts."""
    speech, text = SpeechServiceStub(channel), TextServiceStub(channel)

    async def converse() -> bytes:
        call = speech.StreamingSynthesize(iter([session_config(), say("Hello there.")]))
        return grouped([response async for response in call]).data

    async def generate() -> str:
        return str((await text.Generate(pb.GenerateRequest(**generation()))).text)

    calls = [call() for call in (converse, generate) for _ in range(4)]
    return list(await asyncio.gather(*calls))


def test_an_idle_model_is_unloaded_and_loaded_by_the_next_call(unloader: Unloading) -> None:
    async def scenario() -> None:
        process, channel = unloader.value
        start = len(process.log)
        before, loaded = await synthesize_on(channel), resident_bytes(process)
        url = (await process.logged(r"metrics.*(http://\S+)"))[1]
        (engine,) = processes_of(process, ENGINE)
        statuses = asyncio.create_task(watched_health(channel))

        async def is_logged() -> bool:
            return "engine has unloaded its model" in process.log[start:]

        async def metric_is(value: int) -> bool:
            return await gauge(url, "sonant_engine_loaded") == value

        await until_unloaded(process)
        await until(is_logged)
        unloaded = resident_bytes(process)
        assert unloaded < 0.75 * loaded, (unloaded, loaded)
        await until(lambda: metric_is(0))
        after, found = await asyncio.gather(synthesize_on(channel), calls_of_all_kinds(channel))
        assert after.data == before.data
        assert len(set(found[:4])) == len(set(found[4:])) == 1
        assert all(found)
        await until(lambda: metric_is(1))
        (again,) = processes_of(process, ENGINE)
        assert again != engine
        assert process.log[start:].count("engine is back") == 1
        statuses.cancel()
        assert set(await statuses) == {SERVING}
        for text in ("ERROR", "WARNING", "Traceback", "starting it again"):
            assert text not in process.log[start:]

    unloader.run(scenario())


async def watched_health(channel: grpc.aio.Channel) -> list[int]:
    """Return the statuses of health checks, one each 20 ms, until this is cancelled."""
    found = []
    try:
        while True:
            found.append(await health(channel))
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return found


def test_front_ends_that_are_restarted_meanwhile_serve(unloader: Unloading) -> None:
    async def scenario() -> None:
        process, channel = unloader.value
        before = await synthesize_on(channel)
        await until_unloaded(process)
        for front_end in processes_of(process, FRONT_END):
            os.kill(front_end, signal.SIGKILL)
        for number in range(2):
            await process.logged(f"front-end-{number} is back")
        assert (await synthesize_on(channel)).data == before.data

    unloader.run(scenario())


def test_an_engine_that_dies_while_it_is_loaded_again(unloader: Unloading) -> None:
    """A call waits for the next one, unless its deadline bounds the wait."""

    async def scenario() -> None:
        process, channel = unloader.value
        await until_unloaded(process)
        bounded = SpeechServiceStub(channel).SynthesizeStream(stream_request(), timeout=0.1)
        error = await error_of(bounded)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = asyncio.create_task(synthesize_on(channel))

        async def is_loading() -> bool:
            return bool(processes_of(process, ENGINE))

        await until(is_loading)
        os.kill(processes_of(process, ENGINE)[0], signal.SIGKILL)
        assert (await call).audio
        assert "engine was ended by SIGKILL; starting it again" in process.log

    unloader.run(scenario())


def test_only_the_model_of_a_call_is_loaded(tiny_checkpoint: Path, text_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint, text_model=text_checkpoint) as (process, channel):
            await until_unloaded(process)
            before = len(process.log)  # while the server starts, one engine may wait for the other
            text = TextServiceStub(channel)
            assert (await text.Generate(pb.GenerateRequest(**generation()))).token_ids
            assert len(processes_of(process, ENGINE)) == 1
            assert "text-engine is back" in process.log[before:]
            assert " engine is back" not in process.log[before:]
            # An unloaded server drains and exits, too.
            await until_unloaded(process)
            await process.logged("(?s)text-engine has unloaded .*text-engine has unloaded ")

    run(scenario())


def test_it_needs_processes() -> None:
    with pytest.raises(ValueError, match="unload_after_s needs front_ends"):
        ServerConfig(unload_after_s=60, front_ends=0)
