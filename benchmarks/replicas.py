"""Audio per second of clients that listen all the time, with one engine and with several replicas.

Two servers of `python -m tts.serve` are on the same cores and are loaded in turn; the clients are
in this process. Each client begins the next call when one has ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import serving
from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc

STREAMS = 8
BAR = 1.6  # two replicas against one engine
WARM_UP_S, SPAN_S = 3.0, 10.0
TEXT = (
    "The ferry leaves at noon and returns before dark. Bring a coat, because the wind is cold on "
    "the water, and something to eat. We will meet you at the harbor."
)


def audio_rate(address: str, streams: int, span_s: float, warm_up_s: float) -> float:
    """Return the seconds of audio per second that clients receive, after a warm-up."""
    begins_s = time.monotonic() + warm_up_s
    listen = partial(_heard_s, address, begins_s, begins_s + span_s)
    with ThreadPoolExecutor(streams) as pool:
        return sum(pool.map(listen, range(streams))) / span_s


def _heard_s(address: str, begins_s: float, ends_s: float, seed: int) -> float:
    """Call a server again and again; return the audio in seconds that came between two moments."""
    config = speech_pb2.SynthesisConfig(sampling=common_pb2.SamplingParams(seed=seed))
    request = speech_pb2.SynthesizeStreamRequest(
        config=config, input=speech_pb2.SynthesisInput(text=TEXT)
    )
    heard_s, rate = 0.0, 1
    with grpc.insecure_channel(address) as channel:
        stub = speech_pb2_grpc.SpeechServiceStub(channel)
        while time.monotonic() < ends_s:
            call = stub.SynthesizeStream(request)
            for event in call:
                now_s = time.monotonic()
                if now_s >= ends_s:
                    call.cancel()
                    break
                if event.HasField("started"):
                    rate = event.started.audio_format.sample_rate_hertz
                elif event.HasField("audio") and now_s >= begins_s:
                    heard_s += event.audio.sample_count / rate
    return heard_s


def measure(
    addresses: tuple[str, str],
    replicas: int,
    repeat: int,
    streams: int = STREAMS,
    span_s: float = SPAN_S,
    warm_up_s: float = WARM_UP_S,
) -> Report:
    """Measure the server with one engine and that with replicas, alternately."""
    rates = [
        [audio_rate(each, streams, span_s, warm_up_s) for each in addresses] for _ in range(repeat)
    ]
    one, several = (tuple(values) for values in zip(*rates, strict=True))
    gains = tuple(b / a for a, b in zip(one, several, strict=True))
    label = f"{streams} streams"
    return Report(
        "replicas",
        (
            Figure(f"{label}, one engine", one, "x real time"),
            Figure(f"{label}, {replicas} replicas", several, "x real time"),
            Figure(
                f"{replicas} replicas against one engine",
                gains,
                "times",
                BAR if replicas == 2 else None,
                at_least=True,
                note="pairs of runs",
            ),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Audio per second of one engine and of replicas.", repeat=3)
    parser.add_argument("--replicas", type=int, default=2, help="engines of the second server")
    parser.add_argument("--streams", type=int, default=STREAMS, help="clients")
    args = parser.parse_args(argv)
    flags = ["--replicas", str(args.replicas)]
    with serving(args.model) as one, serving(args.model, flags) as several:
        addresses = one.address, several.address
        return publish(measure(addresses, args.replicas, args.repeat, args.streams))


if __name__ == "__main__":
    sys.exit(main())
