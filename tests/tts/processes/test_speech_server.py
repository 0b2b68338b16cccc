"""A server that generates texts which another one speaks: that process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

from tests.fakes import tiny_config
from tests.tts.processes.test_kills import until
from tests.tts.server.test_spoken_text import LONG_STORY, STORY, spoken, telling
from tests.tts.server.test_text_service import generation
from tests.tts.server_process import serving_process
from tests.tts.serving import Serving, error_of_reading, health, reason_of, run, serving
from tts.factory import Service, create_service
from tts.server.server import SPOKEN_TEXT
from tts.v1 import text_pb2 as pb

Status = health_pb2.HealthCheckResponse


def test_a_killed_speech_server_ends_its_calls_only(
    tiny_checkpoint: Path, text_checkpoint: Path, service: Service
) -> None:
    config = tiny_config(text_checkpoint, sampling={"enable_structured_output": True})
    writer = create_service(config)

    async def is_lost() -> bool:
        return await health(served.channel, SPOKEN_TEXT) == Status.NOT_SERVING

    async def is_back() -> bool:
        return await health(served.channel, SPOKEN_TEXT) == Status.SERVING

    async def lose_speaker(speaker_pid: int) -> None:
        call = served.text.GenerateSpeech(spoken(telling(" ".join([LONG_STORY] * 3))))
        while (await call.read()).speech.WhichOneof("event") != "audio":
            pass
        os.kill(speaker_pid, signal.SIGKILL)
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "SPEECH_SERVER_LOST"
        assert (await served.text.Generate(pb.GenerateRequest(**generation()))).token_ids
        await until(is_lost)
        assert await health(served.channel) == Status.SERVING

    async def scenario() -> None:
        nonlocal served
        async with serving_process(tiny_checkpoint, front_ends=0) as speaker:
            address = await speaker.ready()
            async with serving(writer, speech_server=address) as served:
                await lose_speaker(speaker.process.pid)
                port = int(address.rpartition(":")[2])
                async with serving(service, port=port):
                    await until(is_back)
                    story = served.text.GenerateSpeech(spoken(telling(STORY)))
                    responses = [response async for response in story]
                    assert responses[-1].speech.WhichOneof("event") == "done"

    served: Serving
    run(scenario())
    asyncio.run(writer.close())
