"""Clients with random arrivals that play speech in real time: `python -m benchmarks.listeners`.

This is one process of several. It reads plans from standard input, one line of JSON each, and
answers each with a line: the results of every client. Arrivals are Poisson and independent of
responses (an open loop); times count from when a client was due, so that a delay of the client
counts, too. Lengths are fixed by the request: end of speech cannot be sampled earlier.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random

import grpc

from benchmarks.playback import Playback
from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc

CHANNELS = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PATIENCE_S = 30.0  # timeout of one stream, in addition to its audio


@dataclass(frozen=True, slots=True)
class Plan:
    """Arrivals and requests. `rate` 0: `count` clients one after the other."""

    rate: float  # clients per second
    seconds: float  # period of the arrivals
    seed: int
    # minimum and maximum audio of one request, uniformly distributed, in multiples of codes
    low_s: float
    high_s: float
    code_rate: float  # codes per second of audio
    multiple: int  # codes
    words: int = 10  # of the text, five letters each
    count: int = 0
    leaving: float = 0.0  # share of clients that leave at the first audio


@dataclass(frozen=True, slots=True)
class StreamResult:
    """Result of one client's stream. Times in seconds from when it was due."""

    due_s: float  # since the plan's start
    first_s: float
    audible_s: float
    audio_s: float
    stalls: int
    stalled_s: float
    first_stall: int | None  # index of the first late message
    prompt_tokens: int
    output_tokens: int
    error: str = ""
    # timings of the response: from submission to the first step, from there to the first token, and
    # from the server's first work on the text to the first audio
    queue_s: float = 0.0
    prefill_s: float = 0.0
    server_s: float = 0.0


def lengths(plan: Plan, random: Random) -> int:
    """Return the number of codes of one request."""
    codes = random.uniform(plan.low_s, plan.high_s) * plan.code_rate
    return max(round(codes / plan.multiple), 1) * plan.multiple


def text(plan: Plan, random: Random) -> str:
    """Return a unique text, so that the prefix cache does not have it."""
    words = ("".join(random.choices(LETTERS, k=5)) for _ in range(plan.words))
    return " ".join(words).capitalize() + "."


def request(plan: Plan, random: Random) -> speech_pb2.SynthesizeStreamRequest:
    """Return a request for a sentence of so many codes, with the voice's own sampling."""
    count = lengths(plan, random)
    sampling = common_pb2.SamplingParams(
        seed=random.getrandbits(32), min_tokens=count, max_tokens=count
    )
    config = speech_pb2.SynthesisConfig(
        sampling=sampling, segment_mode=speech_pb2.SEGMENT_MODE_NONE
    )
    spoken = speech_pb2.SynthesisInput(text=text(plan, random))
    return speech_pb2.SynthesizeStreamRequest(config=config, input=spoken)


def arrivals(plan: Plan, random: Random) -> Iterator[float]:
    """Iterate over seconds since the start, with exponential gaps."""
    moment = random.expovariate(plan.rate)
    while moment < plan.seconds:
        yield moment
        moment += random.expovariate(plan.rate)


class OpenLoopClients:
    """Clients of one server, over a few connections."""

    def __init__(self, address: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = (grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS))
        self._stubs = [speech_pb2_grpc.SpeechServiceStub(channel) for channel in channels]
        self._calls = 0

    async def run_plan(self, plan: Plan) -> list[StreamResult]:
        """Run a plan; return when the last client has received everything."""
        random, start_s = Random(plan.seed), time.monotonic()
        if not plan.rate:
            return [
                await self._run_stream(plan, request(plan, random), time.monotonic(), start_s)
                for _ in range(plan.count)
            ]
        tasks = []
        for moment in list(arrivals(plan, random)):
            asked = request(plan, random)
            await asyncio.sleep(start_s + moment - time.monotonic())
            listening = self._run_stream(plan, asked, start_s + moment, start_s)
            tasks.append(asyncio.create_task(listening))
        return list(await asyncio.gather(*tasks))

    async def _run_stream(
        self, plan: Plan, asked: speech_pb2.SynthesizeStreamRequest, due_s: float, start_s: float
    ) -> StreamResult:
        """Run one call; an error ends it and is part of the result."""
        self._calls += 1
        stub = self._stubs[self._calls % CHANNELS]
        leaves = Random(asked.config.sampling.seed).random() < plan.leaving
        playback, error, usage = Playback(1), "", common_pb2.Usage()
        timings = common_pb2.Timings()
        call = stub.SynthesizeStream(asked, timeout=plan.high_s + PATIENCE_S)
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "started":
                        playback = Playback(event.started.audio_format.sample_rate_hertz)
                    case "audio":
                        playback.take(time.monotonic(), event.audio.data)
                        if leaves:
                            call.cancel()
                            break
                    case "done":
                        usage, timings = event.done.usage, event.done.timings
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        first_s = playback.first_s or time.monotonic()
        return StreamResult(
            due_s=due_s - start_s,
            first_s=first_s - due_s,
            audible_s=(playback.audible_s or first_s) - due_s,
            audio_s=playback.audio_s,
            stalls=playback.stalls,
            stalled_s=playback.stalled_s,
            first_stall=playback.first_stall,
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            error=error,
            queue_s=timings.queue.ToNanoseconds() / 1e9,
            prefill_s=timings.prefill.ToNanoseconds() / 1e9,
            server_s=timings.time_to_first_audio.ToNanoseconds() / 1e9,
        )


async def serve_plans(address: str) -> None:
    """Read plans and answer them until the end of input."""
    listeners, loop = OpenLoopClients(address), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        results = await listeners.run_plan(Plan(**json.loads(line)))
        print(json.dumps([asdict(one) for one in results]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    (address,) = sys.argv[1:] if argv is None else argv
    asyncio.run(serve_plans(address))


if __name__ == "__main__":
    main()
