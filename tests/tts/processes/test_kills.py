"""Real processes that are killed: errors of clients, freed resources, restarts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from tests.deadlines import HANG_S
from tests.tts.ipc.remote_engine import new_base
from tests.tts.server_process import (
    ENGINE,
    FRONT_END,
    Process,
    processes_of,
    serving_process,
)
from tests.tts.serving import (
    CHANNEL_OPTIONS,
    SpeechResponses,
    error_of,
    error_of_reading,
    grouped,
    health,
    hum,
    reason_of,
    retry_s,
    run,
    stream_request,
    wav,
)
from tts.ipc.endpoints import Endpoints
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

Status = health_pb2.HealthCheckResponse
LOOK_S = 0.05  # a look is often a call or a scrape of metrics
CHANNELS = 12  # the kernel spreads them: all are on one of two front ends once in 2,048 runs


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = HANG_S) -> None:
    for _ in range(round(timeout_s / LOOK_S)):
        if await holds():
            return
        await asyncio.sleep(LOOK_S)
    raise AssertionError("it never came true")


def long_request() -> pb.SynthesizeStreamRequest:
    """Request a segment of about 18 s of audio."""
    sampling = common_pb2.SamplingParams(seed=7, min_tokens=450)
    return stream_request("and on it went " * 12, sampling=sampling, seed=None)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        yield channel


async def synthesize_on(channel: grpc.aio.Channel) -> SpeechResponses:
    call = SpeechServiceStub(channel).SynthesizeStream(stream_request(), wait_for_ready=True)
    return grouped([response async for response in call])


async def create_voice(channel: grpc.aio.Channel, name: str) -> None:
    prompt = pb.VoicePrompt(audio=wav(hum(1.5)), transcript="hello there")
    request = pb.CreateVoiceRequest(voice_id=name, prompt=prompt, consent="mine")
    await SpeechServiceStub(channel).CreateVoice(request)


async def voice_names(channel: grpc.aio.Channel) -> set[str]:
    response = await SpeechServiceStub(channel).ListVoices(pb.ListVoicesRequest())
    return {voice.name for voice in response.voices}


def test_each_killed_process_is_restarted(tiny_checkpoint: Path) -> None:
    """First a front end, then the engine, then the engine beyond the restart limit."""
    base = new_base()
    endpoints = Endpoints.of(base)
    flags = {
        "zmq-endpoint-base": base,
        "front-ends": 2,
        "max-restarts": 1,
        "prometheus-metrics-mode": "launch_multiproc_server",
        "metrics-port": 0,
        "max-concurrent-requests": CHANNELS,
        "max-queued-requests": 0,
    }

    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint, **flags) as process,
            AsyncExitStack() as opened,
        ):
            address = await process.ready()
            _check_sizes_and_sockets(process, endpoints)
            channels = [
                await opened.enter_async_context(channel_to(address)) for _ in range(CHANNELS)
            ]
            before = await synthesize_on(channels[0])
            await create_voice(channels[0], "mine")
            for channel in channels:
                assert "mine" in await voice_names(channel)
            await _kill_a_front_end(process, channels)
            await _is_refused(tiny_checkpoint, base)
            await _kill_the_engine(process, channels)
            for channel in channels:
                assert (await synthesize_on(channel)).data == before.data
                assert "mine" in await voice_names(channel)
            os.kill(processes_of(process, ENGINE)[0], signal.SIGKILL)
            assert await process.ended() == 1
            assert "engine was ended by SIGKILL; starting it again in" in process.log
            assert "engine was ended by SIGKILL once too often; giving up" in process.log
            assert "Traceback" not in process.log
        assert [path for path in endpoints.paths if path.exists()] == []

    run(scenario())


def _check_sizes_and_sockets(process: Process, endpoints: Endpoints) -> None:
    """Front ends do not load torch; the sockets exist and only their owner can connect."""
    (engine,) = processes_of(process, ENGINE)
    assert "torch" in _mapped_files(engine)
    for front_end in processes_of(process, FRONT_END):
        assert "torch" not in _mapped_files(front_end)
    for path in endpoints.paths:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) & 0o077 == 0


def _mapped_files(pid: int) -> str:
    """Return the list of files that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text()


async def _is_refused(checkpoint: Path, base: str) -> None:
    """Check that another server with the same endpoints does not start."""
    async with serving_process(checkpoint, **{"zmq-endpoint-base": base}) as second:
        assert await second.ended(60) == 2
        assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)


async def _has_status(status: int, channel: grpc.aio.Channel) -> bool:
    return await health(channel, "tts.v1.SpeechService") == status


async def _kill_a_front_end(process: Process, channels: list[grpc.aio.Channel]) -> None:
    """Kill a front end: its streams' pages are freed, the other front end's stream continues."""
    calls = [SpeechServiceStub(channel).SynthesizeStream(long_request()) for channel in channels]
    for call in calls:
        while (await call.read()).WhichOneof("event") != "audio":
            pass
    refused = await error_of(SpeechServiceStub(channels[0]).SynthesizeStream(stream_request()))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "places are shared"
    os.kill(processes_of(process, FRONT_END)[0], signal.SIGKILL)
    ends = await asyncio.gather(*(_code_of(call) for call in calls))
    assert set(ends) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    url = (await process.logged(r"metrics on (http://127\.0\.0\.1:\d+/metrics)"))[1]
    await until(lambda: _is_free(url))
    await process.logged("front-end-[01] is back")


async def _kill_the_engine(process: Process, channels: list[grpc.aio.Channel]) -> None:
    """Kill the engine: calls fail at once and until it is back, and health reports it."""
    stubs = [SpeechServiceStub(channel) for channel in channels]
    running = [stub.SynthesizeStream(long_request(), wait_for_ready=True) for stub in stubs]
    for call in running:
        while (await call.read()).WhichOneof("event") != "audio":
            pass
    num_back = process.log.count("engine is back")
    os.kill(processes_of(process, ENGINE)[0], signal.SIGKILL)
    failed = [await error_of_reading(call) for call in running]
    assert process.log.count("engine is back") == num_back, "before there is another engine"
    failed.append(await error_of(stubs[0].SynthesizeStream(stream_request())))
    for error in failed:
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "ENGINE_LOST"
        assert retry_s(error) > 0
    for status in (Status.NOT_SERVING, Status.SERVING):
        for channel in channels:
            await until(lambda channel=channel, status=status: _has_status(status, channel))


async def _code_of(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """Read a call to its end and return its status code."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def _is_free(url: str) -> bool:
    """Return whether the metrics show no page in use and no audio stream."""
    scraped = await asyncio.to_thread(_get, url)
    assert 'sonant_kv_pages{state="total"}' in scraped
    in_use = re.findall(
        r'^(?:sonant_kv_pages\{state="used"\}|sonant_audio_streams) (\S+)$', scraped, re.M
    )
    return len(in_use) == 2 and set(in_use) == {"0.0"}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_S) as response:
        return str(response.read().decode())
