"""Real processes that hang: they are killed and restarted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import grpc

from tests.tts.ipc.remote_engine import new_tcp_base
from tests.tts.processes.test_kills import Status, channel_to, long_request, synthesize_on, until
from tests.tts.server_process import ENGINE, Process, processes_of, serving_process
from tests.tts.serving import error_of_reading, health, run
from tts.processes.child import BEAT_S
from tts.processes.supervisor import STALL_S
from tts.v1.speech_pb2_grpc import SpeechServiceStub


def test_a_hanging_engine_is_killed_and_its_endpoints_stay_reserved(tiny_checkpoint: Path) -> None:
    base = new_tcp_base()

    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint, **{"zmq-endpoint-base": base}) as process,
            channel_to(await process.ready()) as channel,
        ):
            before = await synthesize_on(channel)
            (engine,) = processes_of(process, ENGINE)
            await _stop_engine(process, channel, engine)
            # The engine's ports are free for a moment; the base is not.
            async with serving_process(tiny_checkpoint, **{"zmq-endpoint-base": base}) as second:
                assert await second.ended(60) == 2
                assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)
            await process.logged("engine is back")
            await until(lambda: _is_served(channel))
            assert (await synthesize_on(channel)).data == before.data
            assert processes_of(process, ENGINE) != [engine]

    run(scenario(), 150)


def test_a_stopped_engine_is_not_serving_before_it_is_killed(
    tiny_checkpoint: Path,
) -> None:
    """Load balancers see it in time; after SIGCONT the server and its requests continue."""

    async def scenario() -> None:
        async with (
            serving_process(tiny_checkpoint) as process,
            channel_to(await process.ready()) as channel,
        ):
            (engine,) = processes_of(process, ENGINE)
            call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
            await call.read()
            os.kill(engine, signal.SIGSTOP)
            try:
                await until(lambda: _is_refused(channel))
            finally:
                os.kill(engine, signal.SIGCONT)
            assert "killing it" not in process.log, "it was told before"
            await until(lambda: _is_serving(channel))
            kind = ""
            while (response := await call.read()) is not grpc.aio.EOF:
                kind = response.WhichOneof("event")
            assert kind == "done"
            assert processes_of(process, ENGINE) == [engine]

    run(scenario(), 110)


STICKING = '''
"""Llama whose steps wait while there is a file called stuck next to this one."""

import time
from pathlib import Path

from llm import Architecture
from llm.models.llama import LlamaModel

STUCK = Path(__file__).with_name("stuck")


class StickingModel(LlamaModel):
    def execute(self, model_inputs):
        while STUCK.exists():
            time.sleep(0.01)
        return super().execute(model_inputs)


ARCHITECTURES = [Architecture("StickingForCausalLM", "sticking:StickingModel")]
'''


def hanging_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy the checkpoint and change its architecture to the one above."""
    (folder / "sticking.py").write_text(STICKING)
    copy = Path(shutil.copytree(checkpoint, folder / "model"))
    values = json.loads((copy / "config.json").read_text())
    values["architectures"] = ["StickingForCausalLM"]
    (copy / "config.json").write_text(json.dumps(values))
    return copy


def test_an_engine_whose_step_never_returns_is_restarted(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The process and its event loop run; only the step hangs."""
    flags = {"custom-architectures": f"{tmp_path}:sticking", "step-timeout-s": 10}
    stuck = tmp_path / "stuck"

    async def scenario() -> None:
        async with (
            serving_process(hanging_checkpoint(tiny_checkpoint, tmp_path), **flags) as process,
            channel_to(await process.ready()) as channel,
        ):
            before = await synthesize_on(channel)
            (engine,) = processes_of(process, ENGINE)
            call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
            await call.read()
            stuck.touch()
            error = await error_of_reading(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: _is_refused(channel))
            stuck.unlink()
            await process.logged(r"\(step_timeout_s=10\): the engine hangs")
            await process.logged("engine ended with status 1; starting it again")
            await process.logged("engine is back")
            await until(lambda: _is_served(channel))
            assert (await synthesize_on(channel)).data == before.data
            assert processes_of(process, ENGINE) != [engine]

    run(scenario(), 150)


async def _stop_engine(process: Process, channel: grpc.aio.Channel, engine: int) -> None:
    """Stop the engine; it is killed after the heartbeat timeout, and its stream fails."""
    call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
    while (await call.read()).WhichOneof("event") != "audio":
        pass
    stopped_s = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    try:
        error = await error_of_reading(call)
        await process.logged("engine sends no heartbeats: killing it")
    finally:
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - stopped_s > STALL_S - BEAT_S


async def _is_refused(channel: grpc.aio.Channel) -> bool:
    return await health(channel) == Status.NOT_SERVING


async def _is_serving(channel: grpc.aio.Channel) -> bool:
    return await health(channel) == Status.SERVING


async def _is_served(channel: grpc.aio.Channel) -> bool:
    try:
        await synthesize_on(channel)
    except grpc.aio.AioRpcError:
        return False
    return True
