"""A server with two replicas of its model as real processes: spread, lost, drained, measured."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.tts.processes.test_kills import Status, channel_to, create_voice, until, voice_names
from tests.tts.server_process import (
    ENGINE,
    FRONT_END,
    Process,
    Shared,
    is_running,
    processes_of,
    serving_process,
    shared,
)
from tests.tts.serving import error_of, health, reason_of, retry_s, stream_request
from tts.ipc.engine_server import BEAT_S
from tts.v1 import common_pb2
from tts.v1 import speech_pb2 as pb
from tts.v1.speech_pb2_grpc import SpeechServiceStub

REPLICAS, STREAMS = 2, 8
FLAGS = {
    "replicas": REPLICAS,
    "front-ends": 2,
    "max-concurrent-requests": STREAMS,
    "max-queued-requests": 0,
    "max-restarts": 1,  # in a row; drains do not count
    "prometheus-metrics-mode": "launch_multiproc_server",
    "metrics-port": 0,
}


@dataclass(frozen=True)
class Replicated:
    """A server that is ready, and channels that the kernel spreads over its front ends."""

    process: Process
    channels: list[grpc.aio.Channel]
    sockets: Path

    @property
    def stubs(self) -> list[SpeechServiceStub]:
        return [SpeechServiceStub(channel) for channel in self.channels]

    def pid_of(self, number: int) -> int:
        """Return the newest process of a replica."""
        lines = re.findall(rf"engine-{number} is (?:ready|back), process (\d+)", self.process.log)
        return int(lines[-1])

    async def metric(self, name: str) -> list[float]:
        """Return the sums of a metric's samples by replica."""
        url = (await self.process.logged(r"metrics on (http://127\.0\.0\.1:\d+/metrics)"))[1]
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        sums = [0.0] * REPLICAS
        for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.M):
            sums[int(re.findall(r'replica="(\d+)"', labels)[0])] += float(value)
        return sums

    async def until_up(self, expected: list[float]) -> None:
        async def is_so() -> bool:
            return await self.metric("sonant_replica_up") == expected

        await until(is_so)

    async def after_warm_up(self) -> list[float]:
        """Wait until the heartbeats of all replicas count their whole warm-up; return the finished
        sequences by replica.
        """
        found: list[float] = []
        while True:
            before, found = found, await self.metric("sonant_sequences_finished_total")
            if all(found) and found == before:
                return found
            await asyncio.sleep(3 * BEAT_S)

    async def until_finished(self, count: float) -> list[float]:
        """Wait until so many sequences have ended in all; return the numbers by replica."""
        found: list[float] = []

        async def have_ended() -> bool:
            found[:] = await self.metric("sonant_sequences_finished_total")
            return sum(found) >= count

        await until(have_ended)
        return found


@asynccontextmanager
async def replicated(checkpoint: Path, sockets: Path) -> AsyncIterator[Replicated]:
    flags = {"zmq-endpoint-base": f"ipc://{sockets}/x", **FLAGS}
    async with serving_process(checkpoint, **flags) as process, AsyncExitStack() as opened:
        address = await process.ready()
        channels = [await opened.enter_async_context(channel_to(address)) for _ in range(STREAMS)]
        server = Replicated(process, channels, sockets)
        await server.until_up([1, 1])
        yield server
        if process.process.returncode is None:
            process.process.terminate()
            assert await process.ended() == 0
        assert "Traceback" not in process.log


@pytest.fixture(scope="module")
def server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared[Replicated]]:
    """A server whose replicas both serve again after each test but the last."""
    with shared(replicated(tiny_checkpoint, tmp_path_factory.mktemp("sockets"))) as value:
        yield value


def long_request(voice: str = "") -> pb.SynthesizeStreamRequest:
    """Request a segment of about 12 s of audio, the same for all streams."""
    sampling = common_pb2.SamplingParams(seed=7, min_tokens=300, max_tokens=300)
    selection = pb.VoiceSelection(name=voice)
    return stream_request("and on it went " * 12, sampling=sampling, seed=None, voice=selection)


@dataclass
class Stream:
    """A call that is being read, and its audio so far."""

    call: grpc.aio.UnaryStreamCall
    data: bytes = b""

    async def read(self) -> bool:
        """Read a response; return whether there was one."""
        response = await self.call.read()
        if response is grpc.aio.EOF:
            return False
        self.data += response.audio.data
        return True

    async def end(self) -> bytes | grpc.aio.AioRpcError:
        """Return all audio, or the error that the call ends with."""
        try:
            while await self.read():
                pass
        except grpc.aio.AioRpcError as error:
            return error
        return self.data


async def begin(server: Replicated, voice: str = "") -> list[Stream]:
    """Open all streams at once; return them when each has its first audio."""
    request = long_request(voice)
    streams = [Stream(stub.SynthesizeStream(request, wait_for_ready=True)) for stub in server.stubs]
    for stream in streams:
        while not stream.data:
            assert await stream.read()
    return streams


async def ends_of(streams: list[Stream]) -> list[bytes | grpc.aio.AioRpcError]:
    return list(await asyncio.gather(*(stream.end() for stream in streams)))


def test_streams_of_a_new_voice_are_spread_and_equal(server: Shared[Replicated]) -> None:
    """The limit counts the calls of both replicas, and a voice created here is known to both."""

    async def scenario() -> None:
        value = server.value
        await create_voice(value.channels[0], "mine")
        for channel in value.channels:
            assert "mine" in await voice_names(channel)
        before = await value.metric("sonant_sequences_finished_total")
        streams = await begin(value, "mine")
        refused = await error_of(value.stubs[0].SynthesizeStream(stream_request()))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        ends = await ends_of(streams)
        assert len(set(ends)) == 1, "the same seed on either replica"
        after = await value.until_finished(sum(before) + STREAMS)
        spread = [b - a for a, b in zip(before, after, strict=True)]
        assert min(spread) >= STREAMS // 4

    server.run(scenario())


def test_calls_of_one_voice_prefer_one_replica(server: Shared[Replicated]) -> None:
    async def scenario() -> None:
        value = server.value
        before = await value.after_warm_up()
        for stub in value.stubs:
            call = stub.SynthesizeStream(stream_request("Hello.", max_tokens=4))
            assert [response async for response in call]
        after = await value.until_finished(sum(before) + STREAMS)
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0, STREAMS]

    server.run(scenario())


def test_a_killed_replica_loses_only_its_calls(server: Shared[Replicated]) -> None:
    async def scenario() -> None:
        value = server.value
        streams = await begin(value)
        os.kill(value.pid_of(1), signal.SIGKILL)
        ends = await ends_of(streams)
        lost = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert 0 < len(lost) < STREAMS
        for error in lost:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(error) == "ENGINE_LOST"
            assert retry_s(error) > 0
        for channel in value.channels:
            assert await health(channel) == Status.SERVING
        assert "engine-1 was ended by SIGKILL; starting it again" in value.process.log
        await value.process.logged("engine-1 is back")
        await value.until_up([1, 1])
        again = await ends_of(await begin(value))
        assert set(again) == {end for end in ends if isinstance(end, bytes)}
        await value.until_finished(STREAMS)
        assert min(await value.metric("sonant_sequences_finished_total")) > 0

    server.run(scenario())


def test_a_drained_replica_loses_no_call_and_comes_back(server: Shared[Replicated]) -> None:
    async def scenario() -> None:
        value = server.value
        streams = await begin(value)
        before = value.pid_of(0)
        os.kill(before, signal.SIGTERM)
        await value.until_up([0, 1])
        ends = await ends_of(streams)
        assert [end for end in ends if not isinstance(end, bytes)] == []
        await value.process.logged("engine-0 has drained; starting it again")
        await value.process.logged("engine-0 is back")
        assert value.pid_of(0) != before
        await value.until_up([1, 1])

    server.run(scenario())


def test_no_process_outlives_the_supervisor(server: Shared[Replicated]) -> None:
    """And no file of theirs; the last of these tests, because it kills the server."""

    async def scenario() -> None:
        process = server.value.process
        pids = processes_of(process, ENGINE) + processes_of(process, FRONT_END)
        assert len(pids) == 4

        async def have_ended() -> bool:
            return not any(map(is_running, pids))

        assert list(server.value.sockets.iterdir())
        process.process.kill()
        await until(have_ended)
        assert await process.ended() == -signal.SIGKILL
        assert list(server.value.sockets.iterdir()) == []

    server.run(scenario())
