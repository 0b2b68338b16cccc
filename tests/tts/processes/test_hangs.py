"""Real processes that hang: they are killed and restarted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.tts.ipc.remote_engine import new_tcp_base
from tests.tts.processes.test_kills import Status, channel_to, long_request, synthesize_on, until
from tests.tts.server_process import (
    ENGINE,
    FRONT_END,
    IMPATIENT_S,
    Killable,
    Process,
    Shared,
    impatient_process,
    processes_of,
    serving_process,
    shared,
)
from tests.tts.serving import error_of_reading, grouped, health, stream_request
from tts.processes.child import BEAT_S
from tts.v1.speech_pb2_grpc import SpeechServiceStub

STEP_TIMEOUT_S = 5
WORDS = "SQL\tsequel\n"


def test_a_stopped_engine_is_not_serving_before_it_is_killed(killable: Shared[Killable]) -> None:
    """Load balancers see it in time; after SIGCONT the server and its requests continue."""

    async def scenario() -> None:
        process = killable.value.process
        start = len(process.log)
        async with channel_to(killable.value.address) as channel:
            (engine,) = processes_of(process, ENGINE)
            call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
            await call.read()
            os.kill(engine, signal.SIGSTOP)
            try:
                await until(lambda: _is_refused(channel))
            finally:
                os.kill(engine, signal.SIGCONT)
            assert "killing it" not in process.log[start:], "it was told before"
            await until(lambda: _is_serving(channel))
            kind = ""
            while (response := await call.read()) is not grpc.aio.EOF:
                kind = response.WhichOneof("event")
            assert kind == "done"
            assert processes_of(process, ENGINE) == [engine]

    killable.run(scenario())


HANGING = '''
"""Llama that hangs while there are files next to this one.

stuck: each step of the model waits until it is gone; deaf: the front end stops listening once.
"""

import os
import socket
import threading
import time
from pathlib import Path

from llm import Architecture

STUCK, DEAF = (Path(__file__).with_name(name) for name in ("stuck", "deaf"))
ARCHITECTURES = [Architecture("HangingForCausalLM", "hanging:HangingModel")]


def __getattr__(name):
    """Front ends load no model."""
    if name != "HangingModel":
        raise AttributeError(name)
    from llm.models.llama import LlamaModel

    class HangingModel(LlamaModel):
        def execute(self, model_inputs):
            while STUCK.exists():
                time.sleep(0.01)
            return super().execute(model_inputs)

    return HangingModel


def stop_listening():
    while not DEAF.exists():
        time.sleep(0.01)
    for name in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        is_listening = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if is_listening and found.family in (socket.AF_INET, socket.AF_INET6):
            found.shutdown(socket.SHUT_RDWR)
        found.close()
    DEAF.unlink()


if b"tts.processes.front_end" in Path("/proc/self/cmdline").read_bytes():
    threading.Thread(target=stop_listening, daemon=True).start()
'''


def hanging_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Copy the checkpoint and change its architecture to the one above."""
    (folder / "hanging.py").write_text(HANGING)
    copy = Path(shutil.copytree(checkpoint, folder / "model"))
    values = json.loads((copy / "config.json").read_text())
    values["architectures"] = ["HangingForCausalLM"]
    (copy / "config.json").write_text(json.dumps(values))
    return copy


@dataclass(frozen=True)
class Hanging:
    """A server that detects soon that a process hangs; files in `folder` make it hang.

    Its lexicon `words` has SQL, and another file has "hello".
    """

    server: Shared[tuple[Process, str]]
    base: str
    folder: Path
    words: Path


@pytest.fixture(scope="module")
def hanging(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    folder, base = tmp_path_factory.mktemp("hanging"), new_tcp_base()
    words, other = folder / "words.txt", folder / "other.txt"
    words.write_text(WORDS)
    other.write_text("hello\thallo\n")

    @asynccontextmanager
    async def serving() -> AsyncIterator[tuple[Process, str]]:
        model = hanging_checkpoint(tiny_checkpoint, folder)
        flags = {
            "custom-architectures": f"{folder}:hanging",
            "step-timeout-s": STEP_TIMEOUT_S,
            "zmq-endpoint-base": base,
            "lexicon": f"{words},{other}",
            "prometheus-metrics-mode": "launch_multiproc_server",
            "metrics-port": 0,
        }
        async with impatient_process(model, **flags) as process:
            yield process, await process.ready()

    with shared(serving()) as server:
        yield Hanging(server, base, folder, words)


def test_a_hanging_engine_is_killed_and_its_endpoints_stay_reserved(
    hanging: Hanging, tiny_checkpoint: Path
) -> None:
    async def scenario() -> None:
        process, address = hanging.server.value
        start = len(process.log)
        async with channel_to(address) as channel:
            before = await synthesize_on(channel)
            (engine,) = processes_of(process, ENGINE)
            await _stop_engine(process, channel, engine)
            # The engine's ports are free for a moment; the base is not.
            own = {"zmq-endpoint-base": hanging.base}
            async with serving_process(tiny_checkpoint, **own) as second:
                assert await second.ended() == 2
                assert re.search(r"serve: zmq_endpoint_base=\S+ is another server's", second.log)
            await process.logged("engine is back", start)
            await until(lambda: _is_served(channel))
            assert (await synthesize_on(channel)).data == before.data
            assert processes_of(process, ENGINE) != [engine]

    hanging.server.run(scenario())


def test_an_engine_whose_step_never_returns_is_restarted(hanging: Hanging) -> None:
    """The process and its event loop run; only the step hangs."""

    async def scenario() -> None:
        process, address = hanging.server.value
        start, stuck = len(process.log), hanging.folder / "stuck"
        async with channel_to(address) as channel:
            before = await synthesize_on(channel)
            (engine,) = processes_of(process, ENGINE)
            call = SpeechServiceStub(channel).SynthesizeStream(long_request())
            await call.read()
            stuck.touch()
            error = await error_of_reading(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: _is_refused(channel))
            stuck.unlink()
            await process.logged(rf"\(step_timeout_s={STEP_TIMEOUT_S}\): the engine hangs", start)
            await process.logged("engine ended with status 1; starting it again", start)
            await process.logged("engine is back", start)
            await until(lambda: _is_served(channel))
            assert (await synthesize_on(channel)).data == before.data
            assert processes_of(process, ENGINE) != [engine]

    hanging.server.run(scenario())


def test_a_front_end_that_accepts_no_connections_is_restarted(hanging: Hanging) -> None:
    """The process and its event loop run; only new connections fail."""

    async def scenario() -> None:
        process, address = hanging.server.value
        start = len(process.log)
        async with channel_to(address) as channel:
            before = await synthesize_on(channel)
        (front_end,) = processes_of(process, FRONT_END)
        (hanging.folder / "deaf").touch()
        await process.logged("front-end-0 takes no connections: killing it", start)
        await process.logged("front-end-0 is back", start)
        async with channel_to(address) as channel:
            assert (await synthesize_on(channel)).data == before.data
        assert processes_of(process, FRONT_END) != [front_end]

    hanging.server.run(scenario())


def test_a_front_end_is_restarted_although_a_lexicon_is_broken(hanging: Hanging) -> None:
    async def phrases(channel: grpc.aio.Channel) -> list[str]:
        request = stream_request("Hello SQL.", max_tokens=4)
        call = SpeechServiceStub(channel).SynthesizeStream(request, wait_for_ready=True)
        found = grouped([response async for response in call]).done.pronunciations
        return sorted(entry.phrase for entry in found)

    async def num_broken(process: Process) -> str:
        url = (await process.logged(r"metrics on (http://127\.0\.0\.1:\d+/metrics)"))[1]
        text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
        return "".join(re.findall(r"^sonant_broken_lexicons (\S+)", text, re.M))

    async def scenario() -> None:
        process, address = hanging.server.value
        start, words = len(process.log), hanging.words
        async with channel_to(address) as channel:
            assert await phrases(channel) == ["SQL", "hello"]
            words.write_text("no lexicon at all\n")
            os.kill(processes_of(process, FRONT_END)[0], signal.SIGKILL)
            await process.logged("front-end-0 is back", start)
            await process.logged(r"words\.txt:1: .*; it is left out until it is mended", start)
            assert await phrases(channel) == ["hello"]
            await until(lambda: _is(num_broken(process), "1.0"))
            words.write_text(WORDS)
            await until(lambda: _is(phrases(channel), ["SQL", "hello"]))
            await until(lambda: _is(num_broken(process), "0.0"))
            assert "Traceback" not in process.log[start:]

    hanging.server.run(scenario())


async def _is(value: Awaitable[object], expected: object) -> bool:
    return await value == expected


async def _stop_engine(process: Process, channel: grpc.aio.Channel, engine: int) -> None:
    """Stop the engine; it is killed after the heartbeat timeout, and its stream fails."""
    start = len(process.log)
    call = SpeechServiceStub(channel).SynthesizeStream(long_request(), wait_for_ready=True)
    while (await call.read()).WhichOneof("event") != "audio":
        pass
    stopped_s = time.monotonic()
    os.kill(engine, signal.SIGSTOP)
    try:
        error = await error_of_reading(call)
        await process.logged("engine sends no heartbeats: killing it", start)
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
