"""Real processes, killed: what clients see, what is freed, what comes back."""

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

from tests.tts.ipc.hop import new_base
from tests.tts.server_process import (
    ENGINE,
    FRONT_END,
    Process,
    is_running,
    processes_of,
    serving_process,
)
from tests.tts.serving import (
    CHANNEL_OPTIONS,
    Spoken,
    error_of,
    error_of_reading,
    health,
    hum,
    reason_of,
    retry_s,
    run,
    stream_request,
    taken_apart,
    wav,
)
from tts.ipc.endpoints import Endpoints
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

Status = health_pb2.HealthCheckResponse
CHANNELS = 12  # the kernel spreads them: all are on one of two front ends once in 2,048 runs


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    for _ in range(round(timeout_s / 0.02)):
        if await holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


def endless() -> pb.SynthesizeStreamRequest:
    """A segment that goes on until somebody ends it: about 18 s of audio."""
    sampling = common_pb2.SamplingParams(seed=7, min_tokens=450)
    return stream_request("and on it went " * 12, sampling=sampling, seed=None)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        yield channel


async def heard(channel: grpc.aio.Channel) -> Spoken:
    call = SpeechServiceStub(channel).SynthesizeStream(stream_request(), wait_for_ready=True)
    return taken_apart([response async for response in call])


async def create_voice(channel: grpc.aio.Channel, name: str) -> None:
    prompt = pb.VoicePrompt(audio=wav(hum(1.5)), transcript="hello there")
    request = pb.CreateVoiceRequest(voice_id=name, prompt=prompt, consent="mine")
    await SpeechServiceStub(channel).CreateVoice(request)


async def voice_names(channel: grpc.aio.Channel) -> set[str]:
    response = await SpeechServiceStub(channel).ListVoices(pb.ListVoicesRequest())
    return {voice.name for voice in response.voices}


def test_each_process_is_killed_and_comes_back(tiny_checkpoint: Path) -> None:
    """First a front end, then the engine, then the engine once too often."""
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
            before = await heard(channels[0])
            await create_voice(channels[0], "mine")
            for channel in channels:
                assert "mine" in await voice_names(channel)
            await _lose_a_front_end(process, channels)
            await _is_refused(tiny_checkpoint, base)
            await _lose_the_engine(process, channels)
            for channel in channels:
                assert (await heard(channel)).data == before.data
                assert "mine" in await voice_names(channel)
            os.kill(processes_of(process, ENGINE)[0], signal.SIGKILL)
            assert await process.ended() == 1
            assert "engine was ended by SIGKILL; starting it again in" in process.log
            assert "engine was ended by SIGKILL once too often; giving up" in process.log
            assert "Traceback" not in process.log
        assert [path for path in endpoints.paths if path.exists()] == []

    run(scenario(), 110)


def test_nothing_outlives_the_supervisor(tiny_checkpoint: Path) -> None:
    base = new_base()

    async def scenario() -> None:
        async with serving_process(tiny_checkpoint, **{"zmq-endpoint-base": base}) as process:
            await process.logged("listening on")
            pids = processes_of(process, ENGINE) + processes_of(process, FRONT_END)
            assert len(pids) == 2
            process.process.kill()
            await until(lambda: _are_gone(pids))
        assert not Path(base.removeprefix("ipc://") + "-lock").exists()

    run(scenario(), 100)


def _check_sizes_and_sockets(process: Process, endpoints: Endpoints) -> None:
    """Front ends are small; the given endpoints are bound, and nobody else can connect."""
    (engine,) = processes_of(process, ENGINE)
    assert "torch" in _mapped(engine)
    for front_end in processes_of(process, FRONT_END):
        assert "torch" not in _mapped(front_end)
    for path in endpoints.paths:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) & 0o077 == 0


def _mapped(pid: int) -> str:
    """The files that a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text()


async def _is_refused(checkpoint: Path, base: str) -> None:
    """Another server with the same endpoints does not start."""
    async with serving_process(checkpoint, **{"zmq-endpoint-base": base}) as second:
        assert await second.ended(60) == 2
        assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)


async def _is(status: int, channel: grpc.aio.Channel) -> bool:
    return await health(channel, "tts.v1.SpeechService") == status


async def _lose_a_front_end(process: Process, channels: list[grpc.aio.Channel]) -> None:
    """Its streams' pages are freed, what the other one does goes on."""
    calls = [SpeechServiceStub(channel).SynthesizeStream(endless()) for channel in channels]
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


async def _lose_the_engine(process: Process, channels: list[grpc.aio.Channel]) -> None:
    """Calls fail at once, and new ones until it is back; health says so all the while."""
    stubs = [SpeechServiceStub(channel) for channel in channels]
    running = [stub.SynthesizeStream(endless(), wait_for_ready=True) for stub in stubs]
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
            await until(lambda channel=channel, status=status: _is(status, channel))


async def _code_of(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:
    """What a call ends with."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def _are_gone(pids: list[int]) -> bool:
    return not any(map(is_running, pids))


async def _is_free(url: str) -> bool:
    """By the engine's own account no page is used and no audio stream is alive."""
    scraped = await asyncio.to_thread(_get, url)
    assert 'sonant_kv_pages{state="total"}' in scraped
    in_use = re.findall(
        r'^(?:sonant_kv_pages\{state="used"\}|sonant_audio_streams) (\S+)$', scraped, re.M
    )
    return len(in_use) == 2 and set(in_use) == {"0.0"}


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())
