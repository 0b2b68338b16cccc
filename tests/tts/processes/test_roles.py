"""Servers whose prompts other engines compute, as real processes: same audio, killed, restarted."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path

from tests.tts.ipc.remote_engine import new_tcp_base
from tests.tts.processes.test_kills import channel_to, until
from tests.tts.server_process import SOON_S, Process, restarting_process, serving_process
from tests.tts.serving import run, stream_request
from tts.v1 import common_pb2
from tts.v1.speech_pb2_grpc import SpeechServiceStub

CALLS = 6
PAGES = {"model.kv-cache.kv-cache-page-size": 16}
METRICS = {"prometheus-metrics-mode": "launch_multiproc_server", "metrics-port": 0}
READY = re.compile(r"ready: (tcp://\S+) model=(\S+) voices=none\n")


async def audio_of(address: str, name: str = "") -> list[bytes]:
    """Return the audio of calls that run together, each with a prompt of its own."""

    async def one(number: int) -> bytes:
        text = f"number {number} {name}continues, and on it goes."
        sampling = common_pb2.SamplingParams(seed=number, min_tokens=60, max_tokens=60)
        async with channel_to(address) as channel:
            call = SpeechServiceStub(channel).SynthesizeStream(
                stream_request(text, sampling=sampling, seed=None), wait_for_ready=True
            )
            return b"".join([response.audio.data async for response in call])

    return list(await asyncio.gather(*(one(number) for number in range(CALLS))))


async def pages_of(process: Process) -> float:
    """Return how many pages the server's engines have received."""
    url = (await process.logged(r"metrics on (http://127\.0\.0\.1:\d+/metrics)"))[1]
    text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
    found = re.findall(
        r'^sonant_exchanged_pages_total\{.*direction="received".*\} (\S+)$', text, re.M
    )
    return sum(map(float, found))


def pid_of(process: Process, name: str) -> int:
    return int(re.findall(rf"{name} is (?:ready|back), process (\d+)", process.log)[-1])


def num_mapped(pid: int) -> int:
    """Return how many pools of other processes an engine for prompts maps."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:sonant-kv")


def test_a_server_with_an_engine_for_prompts(tiny_checkpoint: Path, server: str) -> None:
    """Its audio is that of one engine, also while that for prompts is killed, and when it is gone;
    a drained one comes back. The pool of a killed engine is unmapped.
    """

    async def scenario() -> None:
        expected = await audio_of(server), await audio_of(server, "again ")
        flags = {"prefill-devices": "cpu", "replicas": 2, "max-restarts": 0, **METRICS}
        async with restarting_process(tiny_checkpoint, **PAGES, **flags) as process:
            address = await process.ready()
            assert await audio_of(address) == expected[0]

            async def has_received() -> bool:
                return await pages_of(process) >= CALLS

            await until(has_received)
            calls = asyncio.create_task(audio_of(address, "again "))
            await asyncio.sleep(0.1)
            os.kill(pid_of(process, "prefill-0"), signal.SIGKILL)
            assert await calls == expected[1]
            assert await audio_of(address) == expected[0]
            await process.logged(f"prefill-0 was ended by SIGKILL; starting it again in {SOON_S} s")
            await process.logged("prefill-0 is back")
            os.kill(pid_of(process, "engine-0"), signal.SIGKILL)
            await process.logged("engine-0 is back")
            assert await audio_of(address) == expected[0]

            async def maps_what_is_there() -> bool:
                return num_mapped(pid_of(process, "prefill-0")) <= 2

            await until(maps_what_is_there)
            os.kill(pid_of(process, "prefill-0"), signal.SIGTERM)
            await process.logged("prefill-0 has drained; starting it again")
            assert await audio_of(address) == expected[0]
            process.process.terminate()
            assert await process.ended() == 0
            assert "Traceback" not in process.log

    run(scenario())


def test_two_servers_by_address(tiny_checkpoint: Path, server: str) -> None:
    """One computes prompts, the other has the clients; the first is killed when prompts and their
    rooms have been sent to it, and started again.
    """

    async def scenario() -> None:
        expected, others = await audio_of(server), await audio_of(server, "again ")
        base = new_tcp_base()
        prompts = {"pipeline-role": "prefill_only", "zmq-endpoint-base": base, **PAGES}
        decodes = {"pipeline-role": "decode_only", "prefill-endpoints": base, **PAGES, **METRICS}
        async with AsyncExitStack() as opened:
            first = serving_process(tiny_checkpoint, **prompts)
            prefill = await opened.enter_async_context(first)
            line = await prefill.line()
            match = READY.fullmatch(line)
            assert match, (line, prefill.log)
            assert match[1] == base
            second = serving_process(tiny_checkpoint, **decodes)
            decode = await opened.enter_async_context(second)
            address = await decode.ready()
            assert await audio_of(address) == expected

            async def has_received() -> bool:
                return await pages_of(decode) >= CALLS

            await until(has_received)
            pid = pid_of(prefill, "prefill-0")
            os.kill(pid, signal.SIGSTOP)
            calls = asyncio.create_task(audio_of(address, "again "))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            assert await calls == others
            await prefill.logged("prefill-0 is back")
            prefill.process.terminate()
            assert await prefill.ended() == 0
            assert await audio_of(address) == expected
            decode.process.terminate()
            assert await decode.ended() == 0
            assert "Traceback" not in decode.log + prefill.log

    run(scenario())
