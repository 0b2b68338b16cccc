"""Real processes that stand still: they are killed, and come back."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import grpc

from tests.tts.ipc.hop import new_tcp_base
from tests.tts.processes.test_kills import channel_to, endless, heard, until
from tests.tts.server_process import ENGINE, Process, processes_of, serving_process
from tests.tts.serving import error_of_reading, run
from tts.processes.child import BEAT_S
from tts.processes.supervisor import STALL_S
from tts.v1.speech_pb2_grpc import SpeechServiceStub

LATE_S = 10.0


def test_an_engine_that_hangs_is_killed_and_nobody_takes_its_place(tiny_checkpoint: Path) -> None:
    base = new_tcp_base()

    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint, **{"zmq-endpoint-base": base}) as process,
            channel_to(await process.ready()) as channel,
        ):
            before = await heard(channel)
            (engine,) = processes_of(process, ENGINE)
            await _hang(process, channel, engine)
            # The engine's ports are free for a moment; the base is not.
            async with serving_process(tiny_checkpoint, **{"zmq-endpoint-base": base}) as second:
                assert await second.ended(60) == 2
                assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)
            await process.logged("engine is back")
            await until(lambda: _is_served(channel))
            assert (await heard(channel)).data == before.data
            assert processes_of(process, ENGINE) != [engine]

    run(scenario(), 150)


async def _hang(process: Process, channel: grpc.aio.Channel, engine: int) -> None:
    """It is killed when it was silent for too long, no earlier; its stream is told."""
    call = SpeechServiceStub(channel).SynthesizeStream(endless(), wait_for_ready=True)
    while (await call.read()).WhichOneof("event") != "audio":
        pass
    stopped_s = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    try:
        error = await error_of_reading(call)
        await process.logged("engine gives no sign of life: killing it")
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert STALL_S - BEAT_S < time.monotonic() - stopped_s < STALL_S + LATE_S


async def _is_served(channel: grpc.aio.Channel) -> bool:
    try:
        await heard(channel)
    except grpc.aio.AioRpcError:
        return False
    return True
