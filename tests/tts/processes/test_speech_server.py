"""Two servers as real processes: one generates texts that the other one speaks, and is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.tts.processes.test_kills import channel_to, until
from tests.tts.server.test_spoken_text import LONG_STORY, STORY, spoken, telling
from tests.tts.server.test_text_service import generation
from tests.tts.server_process import serving_process
from tests.tts.serving import error_of_reading, health, reason_of, run
from tts.server.server import SPOKEN_TEXT
from tts.v1 import text_pb2 as pb
from tts.v1.text_pb2_grpc import TextServiceStub

Status = health_pb2.HealthCheckResponse


def test_a_killed_speech_server_ends_its_calls_only(
    tiny_checkpoint: Path, text_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONANT_SAMPLING__ENABLE_STRUCTURED_OUTPUT", "true")

    async def ask(channel: grpc.aio.Channel, address: str) -> None:
        stub = TextServiceStub(channel)
        endless = spoken(telling(" ".join([LONG_STORY] * 3)))
        call = stub.GenerateSpeech(endless)
        while (await call.read()).speech.WhichOneof("event") != "audio":
            pass
        os.kill(speaker_pid, signal.SIGKILL)
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(error) == "SPEECH_SERVER_LOST"
        assert (await stub.Generate(pb.GenerateRequest(**generation()))).token_ids

        async def is_lost() -> bool:
            return await health(channel, SPOKEN_TEXT) == Status.NOT_SERVING

        async def is_back() -> bool:
            return await health(channel, SPOKEN_TEXT) == Status.SERVING

        await until(is_lost)
        assert await health(channel) == Status.SERVING
        port = address.rpartition(":")[2]
        async with serving_process(tiny_checkpoint, port=port, front_ends=0) as speaker:
            await speaker.ready()
            await until(is_back)
            responses = [r async for r in stub.GenerateSpeech(spoken(telling(STORY)))]
            assert responses[-1].speech.WhichOneof("event") == "done"

    async def scenario() -> None:
        nonlocal speaker_pid
        async with serving_process(tiny_checkpoint, front_ends=0) as speaker:
            address, speaker_pid = await speaker.ready(), speaker.process.pid
            async with serving_process(text_checkpoint, speech_server=address) as writer:
                line = await writer.line()
                async with channel_to(line.split()[1]) as channel:
                    await ask(channel, address)
                writer.process.terminate()
                assert await writer.ended() == 0

    speaker_pid = 0
    run(scenario())
