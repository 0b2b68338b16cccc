"""A front end with a stub engine: a gRPC server whose audio blocks are prepared in advance.

`python -m benchmarks.stub_engine` is the server; `StubEngineClient` implements `EngineClient`. The
carried codes of each block encode the time at which it was due, so that the client can compute the
latency of the front end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

import numpy as np

from decoder import AudioEncoding, CodecSpec, PrependPromptSpeechTokens, StreamingOptions
from llm import FinishReason, Request, TokenChunk
from tests.speech_server import Server, started
from tts.config.defaults import VOICE_TOKENS, default_values
from tts.config.pipeline import AudioGenerationConfig
from tts.config.server import ServerConfig
from tts.engine.client import AudioBlock, EncodedClip, EngineInfo, Hold, SpeechJob
from tts.factory import connect_service
from tts.observe.engine_status import EngineStatus
from tts.processes.child import freeze_garbage
from tts.server.server import SpeechServer

RATE = 24_000
NUM_CODES = 16_384
BLOCK_S = 0.1
MICRO = 1_000_000
MAX_CALLS = 1_000


class StubEngineClient:
    """Speaks `num_blocks` blocks of a tone for each job, one every `period_s` (0: at once)."""

    def __init__(self, num_blocks: int, period_s: float) -> None:
        self._num_blocks, self._period_s = num_blocks, period_s
        self._samples = np.sin(np.arange(round(BLOCK_S * RATE)) / 8).astype(np.float32)

    @property
    def codec(self) -> CodecSpec | None:
        """One code for each block; codes and voices as in the built-in voice."""
        return CodecSpec(
            "stub_engine_server",
            RATE,
            Fraction(len(self._samples)),
            codebook_size=NUM_CODES,
            voice_codes=VOICE_TOKENS,
            recommended=StreamingOptions(prepend=PrependPromptSpeechTokens.ROLLING),
        )

    async def speak(self, job: SpeechJob) -> AsyncGenerator[AudioBlock, None]:
        start = time.monotonic()
        for number in range(self._num_blocks):
            due = start + number * self._period_s if self._period_s else time.monotonic()
            if due > time.monotonic():
                await asyncio.sleep(due - time.monotonic())
            yield AudioBlock(
                samples=self._samples,
                first_sample=number * len(self._samples),
                first_code=number,
                num_codes=1,
                carry=divmod(round(due * MICRO), MICRO),
                finish_reason=FinishReason.STOP if number == self._num_blocks - 1 else None,
            )

    async def generate(
        self, request: Request, hold: Hold | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(request.request_id, finish_reason=FinishReason.STOP)

    async def encode_prompt(self, samples: np.ndarray) -> EncodedClip:
        return EncodedClip((0,) * (len(samples) // len(self._samples)))

    async def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 0, 0, 0, 0)

    async def close(self, drain_s: float = 0.0) -> None:
        """Nothing runs on its own."""


async def serve(client: StubEngineClient) -> None:
    """Serve with the built-in voice's prompts, and without its weights, until ended."""
    config = AudioGenerationConfig(**default_values())
    server_config = ServerConfig(
        port=0, max_concurrent_requests=MAX_CALLS, max_streams_per_client=MAX_CALLS
    )
    facts = EngineInfo(client.codec, max_seq_len=4096, raw_encoding=AudioEncoding.PCM_S16LE)
    server = SpeechServer(server_config)
    await server.start()
    await server.serve(connect_service(config, server_config, client, facts))
    freeze_garbage()
    print(f"ready: {server.address}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def stub_engine_server(num_blocks: int, period_s: float) -> Iterator[Server]:
    """Run a server with the stub engine as a process while the block lasts."""
    flags = [f"--blocks={num_blocks}", f"--period-s={period_s}"]
    with started([sys.executable, "-m", "benchmarks.stub_engine", *flags]) as server:
        yield server


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A front end with canned audio behind it.")
    parser.add_argument("--blocks", type=int, default=100, help="blocks of each request")
    parser.add_argument("--period-s", type=float, default=0.0, help="between blocks (0: at once)")
    args = parser.parse_args(argv)
    asyncio.run(serve(StubEngineClient(args.blocks, args.period_s)))


if __name__ == "__main__":
    main()
