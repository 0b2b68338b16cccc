"""Listeners that come at random and hear speech in real time: `python -m benchmarks.listeners`.

One process of several. It reads plans from standard input, a line of JSON each, and answers each
with a line: what every listener heard. Arrivals are Poisson and do not wait for anybody (an open
loop); a listener's time counts from when it was due, so a late client is not forgiven either.
Lengths are fixed by the request: no end of speech can be sampled before them.
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
PATIENCE_S = 30.0  # beyond its audio, for one stream


@dataclass(frozen=True, slots=True)
class Plan:
    """Who comes when, and what they ask for. `rate` 0: one after the other, `count` of them."""

    rate: float  # listeners per second
    seconds: float  # in which they come
    seed: int
    low_s: float  # audio of one request, evenly between both, in whole multiples of codes
    high_s: float
    code_rate: float  # codes per second of audio
    multiple: int  # codes
    words: int = 10  # of the text, five letters each
    count: int = 0
    leaving: float = 0.0  # share of the listeners who go away at the first audio


@dataclass(frozen=True, slots=True)
class Heard:
    """One listener's stream. Times in seconds from when it was due."""

    due_s: float  # since the plan's start
    first_s: float
    audible_s: float
    audio_s: float
    stalls: int
    stalled_s: float
    first_stall: int | None  # the first late message, counted from 0
    prompt_tokens: int
    output_tokens: int
    error: str = ""


def lengths(plan: Plan, random: Random) -> int:
    """Codes of one request."""
    codes = random.uniform(plan.low_s, plan.high_s) * plan.code_rate
    return max(round(codes / plan.multiple), 1) * plan.multiple


def text(plan: Plan, random: Random) -> str:
    """Nobody else's, so that no prefix cache has it."""
    words = ("".join(random.choices(LETTERS, k=5)) for _ in range(plan.words))
    return " ".join(words).capitalize() + "."


def request(plan: Plan, random: Random) -> speech_pb2.SynthesizeStreamRequest:
    """A sentence of so many codes, the voice's own sampling."""
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
    """Seconds since the start, exponential gaps."""
    moment = random.expovariate(plan.rate)
    while moment < plan.seconds:
        yield moment
        moment += random.expovariate(plan.rate)


class Listeners:
    """Clients of one server, over a few connections."""

    def __init__(self, address: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = (grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS))
        self._stubs = [speech_pb2_grpc.SpeechServiceStub(channel) for channel in channels]
        self._calls = 0

    async def hear(self, plan: Plan) -> list[Heard]:
        """Carry a plan out; returns when the last listener has heard everything."""
        random, start_s = Random(plan.seed), time.monotonic()
        if not plan.rate:
            return [
                await self._listen(plan, request(plan, random), time.monotonic(), start_s)
                for _ in range(plan.count)
            ]
        tasks = []
        for moment in list(arrivals(plan, random)):
            asked = request(plan, random)
            await asyncio.sleep(start_s + moment - time.monotonic())
            listening = self._listen(plan, asked, start_s + moment, start_s)
            tasks.append(asyncio.create_task(listening))
        return list(await asyncio.gather(*tasks))

    async def _listen(
        self, plan: Plan, asked: speech_pb2.SynthesizeStreamRequest, due_s: float, start_s: float
    ) -> Heard:
        """One call; an error ends it and is part of what was heard."""
        self._calls += 1
        stub = self._stubs[self._calls % CHANNELS]
        leaves = Random(asked.config.sampling.seed).random() < plan.leaving
        playback, usage, error = Playback(1), common_pb2.Usage(), ""
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
                        usage = event.done.usage
        except grpc.aio.AioRpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        first_s = playback.first_s or time.monotonic()
        return Heard(
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
        )


async def serve_plans(address: str) -> None:
    """Read plans and answer them until there are no more."""
    listeners, loop = Listeners(address), asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        heard = await listeners.hear(Plan(**json.loads(line)))
        print(json.dumps([asdict(one) for one in heard]), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    (address,) = sys.argv[1:] if argv is None else argv
    asyncio.run(serve_plans(address))


if __name__ == "__main__":
    main()
