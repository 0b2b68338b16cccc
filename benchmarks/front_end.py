"""Throughput of a front end process in audio messages per second, and its latency.

The engine behind it is a stub (benchmarks.stub_engine), the gRPC clients are in this process.
Latency is measured from the time at which a block was due to its arrival at the client, with the
work of both ends.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from benchmarks.report import Figure, Report, arguments, publish
from benchmarks.stub_engine import MICRO, stub_engine_server
from tts.v1 import speech_pb2

BAR_RATE = 3_000.0  # messages per second
BAR_MS = 5.0
STREAMS, CHANNELS = 48, 4
OFFERED = 3_050.0  # messages per second, slightly above the bar: latency is measured at this rate
RAMP_S = 1.0  # duration over which streams begin, as clients do not all start at once
METHOD = "/tts.v1.SpeechService/SynthesizeStream"


@dataclass(frozen=True, slots=True)
class Load:
    """Measurements of the clients of one run."""

    rate: float  # audio messages per second of all streams
    latencies_s: tuple[float, ...]

    def percentile_ms(self, percent: int) -> float:
        return 1000 * statistics.quantiles(self.latencies_s, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True)
class Message:
    """One audio message: when its block was due and when it arrived, seconds of one clock."""

    due_s: float
    arrived_s: float


async def listen(channel: grpc.aio.Channel, delay_s: float) -> list[tuple[float, bytes]]:
    """Read one stream: messages as bytes with their arrival times; they are parsed later."""
    await asyncio.sleep(delay_s)
    call = channel.unary_stream(METHOD)
    request = speech_pb2.SynthesizeStreamRequest(input=speech_pb2.SynthesisInput(text="Hello."))
    return [(time.monotonic(), data) async for data in call(request.SerializeToString())]


async def load(address: str, num_streams: int, ramp_s: float = 0.0) -> Load:
    """Run streams that begin within `ramp_s`, over a few connections."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(CHANNELS)]
    heard = await asyncio.gather(
        *(
            listen(channels[number % CHANNELS], ramp_s * number / num_streams)
            for number in range(num_streams)
        )
    )
    for channel in channels:
        await channel.close()
    return summed([[*_messages(stream)] for stream in heard])


def _messages(stream: Sequence[tuple[float, bytes]]) -> Iterator[Message]:
    for arrived_s, data in stream:
        response = speech_pb2.SynthesizeStreamResponse.FromString(data)
        if response.WhichOneof("event") == "audio":
            seconds, micros = response.audio.buffer_speech_tokens.tokens
            yield Message(seconds + micros / MICRO, arrived_s)


def summed(streams: Sequence[Sequence[Message]]) -> Load:
    """Sum up; the rate is that of the period in which all streams run."""
    start = max(stream[0].arrived_s for stream in streams)
    end = min(stream[-1].arrived_s for stream in streams)
    messages = [message for stream in streams for message in stream]
    within = sum(start <= message.arrived_s < end for message in messages)
    delays = tuple(message.arrived_s - message.due_s for message in messages)
    return Load(within / (end - start), delays)


def measure(repeat: int, num_blocks: int = 300, num_streams: int = STREAMS) -> Report:
    """Measure at full speed, then at a fixed rate; the first run warms up."""
    with stub_engine_server(num_blocks, 0.0) as server:
        flat_out = [asyncio.run(load(server.address, num_streams)) for _ in range(repeat + 1)][1:]
    with stub_engine_server(num_blocks, num_streams / OFFERED) as server:
        asyncio.run(load(server.address, num_streams))
        paced = [asyncio.run(load(server.address, num_streams, RAMP_S)) for _ in range(repeat)]
    offered = f"at {OFFERED:.0f} messages/s"
    return Report(
        "front end",
        (
            Figure(
                "audio messages, flat out",
                tuple(run.rate for run in flat_out),
                "per s",
                BAR_RATE,
                at_least=True,
                note=f"one process, {num_streams} streams",
            ),
            Figure("audio messages, offered", tuple(run.rate for run in paced), "per s"),
            Figure("added latency, p50", tuple(r.percentile_ms(50) for r in paced), "ms"),
            Figure(
                "added latency, p99",
                tuple(run.percentile_ms(99) for run in paced),
                "ms",
                BAR_MS,
                note=offered,
            ),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Audio messages per second of one front end process.", repeat=5).parse_args(
        argv
    )
    return publish(measure(args.repeat))


if __name__ == "__main__":
    sys.exit(main())
