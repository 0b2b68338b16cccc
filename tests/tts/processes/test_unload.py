"""Real engines that exit when they are idle, and are started again by the next call."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import AsyncIterator
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
    processes_of,
    serving_process,
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
    """Run a server that unloads its models soon, and a channel to it."""
    async with (
        serving_process(checkpoint, unload_after_s=IDLE_S, **flags) as process,
        channel_to(await process.ready()) as channel,
    ):
        yield process, channel


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


def test_an_idle_model_is_unloaded_and_loaded_by_the_next_call(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        exported = {"prometheus_metrics_mode": "launch_server", "metrics_port": 0}
        async with unloading(tiny_checkpoint, **exported) as (process, channel):
            before, loaded = await synthesize_on(channel), resident_bytes(process)
            url = (await process.logged(r"metrics.*(http://\S+)"))[1]
            (engine,) = processes_of(process, ENGINE)
            statuses = asyncio.create_task(watched_health(channel))
            await until_unloaded(process)
            await process.logged("engine has unloaded its model")
            unloaded = resident_bytes(process)
            assert unloaded < 0.75 * loaded, (unloaded, loaded)

            async def metric_is(value: int) -> bool:
                return await gauge(url, "sonant_engine_loaded") == value

            await until(lambda: metric_is(0))
            after = await synthesize_on(channel)
            assert after.data == before.data
            await until(lambda: metric_is(1))
            (again,) = processes_of(process, ENGINE)
            assert again != engine
            await until_unloaded(process)
            assert (await synthesize_on(channel)).data == before.data
            statuses.cancel()
            assert set(await statuses) == {SERVING}
            for text in ("ERROR", "WARNING", "Traceback", "starting it again"):
                assert text not in process.log
            process.process.terminate()
            assert await process.ended() == 0

    run(scenario(), 150)


async def watched_health(channel: grpc.aio.Channel) -> list[int]:
    """Return the statuses of health checks, one each 20 ms, until this is cancelled."""
    found = []
    try:
        while True:
            found.append(await health(channel))
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return found


def test_calls_of_all_kinds_wait_for_one_load(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint, front_ends=2) as (process, channel):
            await until_unloaded(process)
            speech, text = SpeechServiceStub(channel), TextServiceStub(channel)

            async def converse() -> bytes:
                call = speech.StreamingSynthesize(iter([session_config(), say("Hello there.")]))
                return grouped([response async for response in call]).data

            async def generate() -> str:
                return str((await text.Generate(pb.GenerateRequest(**generation()))).text)

            calls = [call() for call in (converse, generate) for _ in range(4)]
            found = await asyncio.gather(*calls)
            assert len(set(found[:4])) == len(set(found[4:])) == 1
            assert all(found)
            assert len(processes_of(process, ENGINE)) == 1
            assert process.log.count("has unloaded its model") == 1

    run(scenario(), 150)


def test_a_deadline_bounds_the_wait(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint) as (process, channel):
            await until_unloaded(process)
            call = SpeechServiceStub(channel).SynthesizeStream(stream_request(), timeout=0.1)
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await synthesize_on(channel)).audio

    run(scenario(), 150)


def test_an_unloaded_server_drains_and_exits(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint) as (process, _):
            await until_unloaded(process)
            await process.logged("engine has unloaded its model")
            process.process.terminate()
            assert await process.ended() == 0

    run(scenario(), 150)


def test_a_front_end_that_is_restarted_meanwhile_serves(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint) as (process, channel):
            before = await synthesize_on(channel)
            await until_unloaded(process)
            os.kill(processes_of(process, FRONT_END)[0], signal.SIGKILL)
            await process.logged("front-end-0 is back")
            assert (await synthesize_on(channel)).data == before.data

    run(scenario(), 150)


def test_an_engine_that_dies_while_it_is_loaded_again(tiny_checkpoint: Path) -> None:
    """The call waits for the next one."""

    async def scenario() -> None:
        async with unloading(tiny_checkpoint) as (process, channel):
            await until_unloaded(process)
            call = asyncio.create_task(synthesize_on(channel))

            async def is_loading() -> bool:
                return bool(processes_of(process, ENGINE))

            await until(is_loading)
            os.kill(processes_of(process, ENGINE)[0], signal.SIGKILL)
            assert (await call).audio
            assert "engine was ended by SIGKILL; starting it again" in process.log

    run(scenario(), 150)


def test_only_the_model_of_a_call_is_loaded(tiny_checkpoint: Path, text_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with unloading(tiny_checkpoint, text_model=text_checkpoint) as (process, channel):
            for _ in range(2):
                await until_unloaded(process)
                text = TextServiceStub(channel)
                assert (await text.Generate(pb.GenerateRequest(**generation()))).token_ids
                assert len(processes_of(process, ENGINE)) == 1
            assert "text-engine is back" in process.log
            assert " engine is back" not in process.log

    run(scenario(), 150)


def test_it_needs_processes() -> None:
    with pytest.raises(ValueError, match="unload_after_s needs front_ends"):
        ServerConfig(unload_after_s=60, front_ends=0)
