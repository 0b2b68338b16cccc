"""Real processes that hang: they are killed and restarted."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.tts.ipc.remote_engine import new_tcp_base
from tests.tts.processes.test_kills import Status, channel_to, long_request, synthesize_on, until
from tests.tts.server_process import (
    ENGINE,
    IMPATIENT_S,
    Process,
    Shared,
    impatient_process,
    processes_of,
    serving_process,
    shared,
)
from tests.tts.serving import error_of_reading, health, run
from tts.processes.child import BEAT_S
from tts.v1.speech_pb2_grpc import SpeechServiceStub

STEP_TIMEOUT_S = 5


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

    run(scenario())


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


@dataclass(frozen=True)
class Hanging:
    """A server that detects a hanging engine soon; the engine's steps wait for `stuck` to go."""

    server: Shared[tuple[Process, grpc.aio.Channel]]
    base: str
    stuck: Path


@pytest.fixture(scope="module")
def hanging(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    folder, base = tmp_path_factory.mktemp("hanging"), new_tcp_base()

    @asynccontextmanager
    async def serving() -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
        model = hanging_checkpoint(tiny_checkpoint, folder)
        flags = {
            "custom-architectures": f"{folder}:sticking",
            "step-timeout-s": STEP_TIMEOUT_S,
            "zmq-endpoint-base": base,
        }
        async with (
            impatient_process(model, **flags) as process,
            channel_to(await process.ready()) as channel,
        ):
            yield process, channel

    with shared(serving()) as server:
        yield Hanging(server, base, folder / "stuck")


def test_a_hanging_engine_is_killed_and_its_endpoints_stay_reserved(
    hanging: Hanging, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        process, channel = hanging.server.value
        before = await synthesize_on(channel)
        (engine,) = processes_of(process, ENGINE)
        await _stop_engine(process, channel, engine)
        # The engine's ports are free for a moment; the base is not.
        own = {"zmq-endpoint-base": hanging.base}
        async with serving_process(tiny_checkpoint, **own) as second:
            assert await second.ended(60) == 2
            assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)
        await process.logged("engine is back")
        await until(lambda: _is_served(channel))
        assert (await synthesize_on(channel)).data == before.data
        assert processes_of(process, ENGINE) != [engine]

    hanging.server.run(scenario())


def test_an_engine_whose_step_never_returns_is_restarted(hanging: Hanging) -> None:
    """The process and its event loop run; only the step hangs."""

    async def scenario() -> None:
        process, channel = hanging.server.value
        start = len(process.log)

        async def is_back() -> bool:
            return "engine is back" in process.log[start:]

        before = await synthesize_on(channel)
        (engine,) = processes_of(process, ENGINE)
        call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
        await call.read()
        hanging.stuck.touch()
        error = await error_of_reading(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: _is_refused(channel))
        hanging.stuck.unlink()
        await process.logged(rf"\(step_timeout_s={STEP_TIMEOUT_S}\): the engine hangs")
        await process.logged("engine ended with status 1; starting it again")
        await until(is_back)
        await until(lambda: _is_served(channel))
        assert (await synthesize_on(channel)).data == before.data
        assert processes_of(process, ENGINE) != [engine]

    hanging.server.run(scenario())


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
    assert time.monotonic() - stopped_s > IMPATIENT_S - BEAT_S


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
