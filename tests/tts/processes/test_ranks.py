"""A server whose model is on two devices: one process for each, started and restarted together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc

from tests.tts.processes.test_kills import (
    Status,
    channel_to,
    long_request,
    synthesize_on,
    until,
)
from tests.tts.server_process import ENGINE, Process, is_running, processes_of, serving_process
from tests.tts.serving import error_of_reading, health, reason_of, run
from tts.v1.speech_pb2_grpc import SpeechServiceStub

RANK = "llm.pipeline.rank_process"


def rank_of(process: Process) -> int:
    """Return the process id of the engine's rank 1."""
    (engine,) = processes_of(process, ENGINE)
    tasks = Path(f"/proc/{engine}/task").iterdir()
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    (rank,) = [p for p in children if RANK in Path(f"/proc/{p}/cmdline").read_text()]
    return int(rank)


def test_a_killed_rank_ends_calls_as_unavailable_and_all_are_restarted(
    tiny_checkpoint: Path,
) -> None:
    async def scenario() -> None:
        async with serving_process(tiny_checkpoint, **{"model.device-specs": "cpu,cpu"}) as process:
            async with channel_to(await process.ready()) as channel:
                before = await synthesize_on(channel)
                call = SpeechServiceStub(channel).SynthesizeStream(long_request())
                await call.read()
                (engine,), rank = processes_of(process, ENGINE), rank_of(process)
                os.kill(rank, signal.SIGKILL)
                error = await error_of_reading(call)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "ENGINE_LOST"

                async def serves() -> bool:
                    is_back = "is back, process" in process.log
                    return is_back and await health(channel) == Status.SERVING

                await until(serves)
                assert (await synthesize_on(channel)).data == before.data
                assert not is_running(engine)
                later, (engine,) = rank_of(process), processes_of(process, ENGINE)
                assert later != rank
                os.kill(later, signal.SIGSTOP)  # it is continued when the engine has ended
                os.kill(engine, signal.SIGKILL)
                process.process.terminate()  # before the engine is started again

                async def has_ended() -> bool:
                    return not is_running(later)

                await until(has_ended)
            assert await process.ended() == 0

    run(scenario())
