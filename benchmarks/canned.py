"""A front end with nothing behind it: a gRPC server whose engine says what it has in store.

`python -m benchmarks.canned` is the server; `CannedClient` is an `EngineClient` like any other.
Each block carries the moment it was due as its carried codes, so that whoever hears it knows how
long the front end has had it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import numpy as np

from benchmarks.serving import Server, started
from decoder import AudioEncoding, CodecSpec
from llm import FinishReason, Request, TokenChunk
from tts.config import AudioGenerationConfig, ServerConfig
from tts.engine_client import AudioBlock, EngineFacts, EngineStatus, SpeechJob
from tts.factory import connect_service, default_values
from tts.processes.child import freeze_garbage
from tts.server import SpeechServer

RATE = 16_000
BLOCK_S = 0.1
MICRO = 1_000_000
MAX_CALLS = 1_000


class CannedClient:
    """Speaks `num_blocks` blocks of a tone for each job, one every `period_s` (0: at once)."""

    def __init__(self, num_blocks: int, period_s: float) -> None:
        self._num_blocks, self._period_s = num_blocks, period_s
        self._samples = np.sin(np.arange(round(BLOCK_S * RATE)) / 8).astype(np.float32)

    @property
    def codec(self) -> CodecSpec | None:
        """One code for each block."""
        return CodecSpec("canned", RATE, Fraction(len(self._samples)), codebook_size=4096)

    async def speak(self, job: SpeechJob) -> AsyncIterator[AudioBlock]:
        start = time.monotonic()
        for number in range(self._num_blocks):
            due = start + number * self._period_s if self._period_s else time.monotonic()
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            yield AudioBlock(
                samples=self._samples,
                block_index=number,
                first_sample=number * len(self._samples),
                first_code=number,
                num_codes=1,
                carry=divmod(round(due * MICRO), MICRO),
                finish_reason=FinishReason.STOP if number == self._num_blocks - 1 else None,
            )

    async def generate(self, request: Request) -> AsyncIterator[TokenChunk]:
        yield TokenChunk(request.request_id, finish_reason=FinishReason.STOP)

    async def encode_prompt(self, samples: np.ndarray) -> tuple[int, ...]:
        return (0,) * (len(samples) // len(self._samples))

    async def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, 0, 0, 0)

    async def close(self, drain_s: float = 0.0) -> None:
        """Nothing runs on its own."""


async def serve(client: CannedClient) -> None:
    """Serve with the embedded voice's prompts, and without its weights, until ended."""
    config = AudioGenerationConfig(**default_values())
    server_config = ServerConfig(
        port=0, max_concurrent_requests=MAX_CALLS, max_streams_per_client=MAX_CALLS
    )
    facts = EngineFacts(client.codec, max_seq_len=4096, raw_encoding=AudioEncoding.PCM_S16LE)
    server = SpeechServer(server_config)
    await server.start()
    await server.serve(connect_service(config, server_config, client, facts))
    freeze_garbage()
    print(f"ready: {server.address}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def canned(num_blocks: int, period_s: float) -> Iterator[Server]:
    """Run a canned server as a process for as long as the block lasts."""
    flags = [f"--blocks={num_blocks}", f"--period-s={period_s}"]
    with started([sys.executable, "-m", "benchmarks.canned", *flags]) as server:
        yield server


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A front end with canned audio behind it.")
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each request")
    parser.add_argument("--period-s", type=float, default=0.0, help="between blocks (0: at once)")
    args = parser.parse_args(argv)
    asyncio.run(serve(CannedClient(args.blocks, args.period_s)))


if __name__ == "__main__":
    main()
