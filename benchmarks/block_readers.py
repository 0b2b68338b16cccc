"""Readers of audio blocks: the front ends' end of the IPC, without a server behind it.

`python -m benchmarks.block_readers` reads speech jobs of one length, some at a time, until it is
terminated: a job that ends is followed by another one. The first ones are shorter by different
numbers of codes, so that they do not all end at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from decoder import StreamingOptions
from decoder.codecs.xcodec2.decoder import RECOMMENDED
from llm import Request, SamplingParams
from tts.engine.client import SpeechJob
from tts.ipc.endpoints import Endpoints
from tts.ipc.remote_client import RemoteEngineClient
from tts.processes.child import freeze_garbage

NUM_CODES = 210  # codes of one job: 4.2 s of speech at 50 codes/s
PROMPT_LEN = 100


def speech_job(name: str, num_codes: int, streaming: StreamingOptions = RECOMMENDED) -> SpeechJob:
    """Return a job of so many codes."""
    request = Request(name, (1,) * PROMPT_LEN, SamplingParams(max_tokens=num_codes))
    return SpeechJob(request, streaming, as_s16=True)


async def read(endpoints: Endpoints, count: int) -> None:
    """Read so many jobs at a time until SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    client = await RemoteEngineClient.connect(endpoints, "reader")
    freeze_garbage()

    async def follow(number: int) -> None:
        num_codes = 1 + (number + 1) * (NUM_CODES - 1) // count
        while True:
            async for _ in client.speak(speech_job(f"stream-{number}", num_codes)):
                pass
            num_codes = NUM_CODES

    try:
        await asyncio.gather(*(follow(number) for number in range(count)))
    finally:
        await client.close()


@contextmanager
def block_readers(endpoints: Endpoints, base: str, streams: int, processes: int) -> Iterator[None]:
    """Read so many streams in several processes while the block lasts."""
    command = [sys.executable, "-m", "benchmarks.block_readers", base, endpoints.server_id]
    shares = [streams // processes + (n < streams % processes) for n in range(processes)]
    running = [subprocess.Popen([*command, str(share)]) for share in shares if share]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Reads blocks of speech behind the hop.")
    parser.add_argument("base", help="zmq_endpoint_base of the engine")
    parser.add_argument("server_id", help="of the engine")
    parser.add_argument("streams", type=int, help="jobs at a time")
    args = parser.parse_args(argv)
    with suppress(asyncio.CancelledError):
        asyncio.run(read(Endpoints.of(args.base, args.server_id), args.streams))


if __name__ == "__main__":
    main()
