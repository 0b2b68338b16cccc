"""A voice and a text model as real processes: one call of both, and the loss of either engine."""

from __future__ import annotations

import os
import signal
import urllib.request
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.tts.processes.test_kills import channel_to, synthesize_on, until
from tests.tts.server.test_spoken_text import LONG_STORY, STORY, spoken, telling
from tests.tts.server.test_text_service import generation
from tests.tts.server_process import ENGINE, Process, Shared, processes_of, serving_process, shared
from tests.tts.serving import error_of_reading, health, reason_of
from tts.processes.engine import NICENESS
from tts.v1 import text_pb2 as pb
from tts.v1.text_pb2_grpc import TextServiceStub

Status = health_pb2.HealthCheckResponse
METRICS = {"prometheus_metrics_mode": "launch_multiproc_server", "metrics_port": 0}
CONFIG = '{"sampling": {"enable_structured_output": true}}'


@asynccontextmanager
async def talking(
    voice: Path, text: Path, **flags: object
) -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
    """Run a server with both models, and a channel to it; then let it drain."""
    own = {"text_model": text, "text_model_config": CONFIG, **flags}
    async with (
        serving_process(voice, **own) as process,
        channel_to(await process.ready()) as channel,
    ):
        yield process, channel
        process.process.terminate()
        assert await process.ended() == 0


Talking = Shared[tuple[Process, grpc.aio.Channel]]


@pytest.fixture(scope="module")
def talker(tiny_checkpoint: Path, text_checkpoint: Path) -> Iterator[Talking]:
    """A server whose engines both serve again after each test."""
    with shared(talking(tiny_checkpoint, text_checkpoint, front_ends=2, **METRICS)) as server:
        yield server


async def pid_of_text_engine(process: Process, channel: grpc.aio.Channel) -> int:
    """Return the id of the engine that computes while a text is generated."""
    engines = processes_of(process, ENGINE)
    before = {pid: _cpu_ticks(pid) for pid in engines}
    endless = generation(max_tokens=600, min_tokens=600, ignore_eos=True)
    await TextServiceStub(channel).Generate(pb.GenerateRequest(**endless))
    return max(engines, key=lambda pid: _cpu_ticks(pid) - before[pid])


def niceness(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_generated_text_is_spoken(talker: Talking) -> None:
    async def scenario() -> None:
        process, channel = talker.value
        assert len(processes_of(process, ENGINE)) == 2
        call = TextServiceStub(channel).GenerateSpeech(spoken(telling(STORY)))
        responses = [response async for response in call]
        assert sum(response.speech.audio.sample_count for response in responses) > 16_000
        url = (await process.logged(r"metrics.*(http://\S+)"))[1]

        async def has_both() -> bool:
            text = (await to_thread(urllib.request.urlopen, url)).read().decode()
            return "\nsonant_kv_pages" in text and "\nsonant_text_kv_pages" in text

        await until(has_both)

    talker.run(scenario())


def test_the_engine_of_the_voice_has_priority(talker: Talking) -> None:
    async def scenario() -> None:
        process, channel = talker.value
        text_engine = await pid_of_text_engine(process, channel)
        (voice_engine,) = set(processes_of(process, ENGINE)) - {text_engine}
        text, voice = niceness(text_engine), niceness(voice_engine)
        assert text == min(voice + NICENESS, 19) > voice

    talker.run(scenario())


@pytest.mark.parametrize("lost", ["text", "voice"])
def test_a_killed_engine_ends_the_call_and_comes_back(talker: Talking, lost: str) -> None:
    async def scenario() -> None:
        process, channel = talker.value
        stub, start = TextServiceStub(channel), len(process.log)
        engines = processes_of(process, ENGINE)
        text_engine, voice_engine = sorted(engines, key=niceness, reverse=True)
        endless = spoken(telling(" ".join([LONG_STORY] * 3)), max_tokens=None)
        call = stub.GenerateSpeech(endless)
        assert (await call.read()).text.WhichOneof("event") == "started"
        os.kill(text_engine if lost == "text" else voice_engine, signal.SIGKILL)
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "ENGINE_LOST"
        if lost == "text":
            assert (await synthesize_on(channel)).audio
        else:
            assert (await stub.Generate(pb.GenerateRequest(**generation()))).token_ids

        async def is_back() -> bool:
            return "is back, process" in process.log[start:]

        async def serves() -> bool:
            return await health(channel) == Status.SERVING

        await until(is_back)
        await until(serves)
        responses = [r async for r in stub.GenerateSpeech(spoken(telling(STORY)))]
        assert responses[-1].speech.WhichOneof("event") == "done"

    talker.run(scenario())
