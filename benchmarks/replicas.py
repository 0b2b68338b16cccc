"""Audio per second of clients that listen all the time, with one engine and with several replicas.

Two servers of `python -m tts.serve` are on the same cores and are loaded in turn; the clients are
in this process. Each client begins the next call when one has ended. Where others use the cores,
too, the processor time for a second of audio says more than the rate.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import grpc

from benchmarks.idle import cpu_s
from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import Server, serving
from tts.v1 import common_pb2, speech_pb2, speech_pb2_grpc

STREAMS = 8
BAR = 1.6  # two replicas against one engine
WARM_UP_S, SPAN_S = 3.0, 10.0
TEXT = (
    "The ferry leaves at noon and returns before dark. Bring a coat, because the wind is cold on "
    "the water, and something to eat. We will meet you at the harbor."
)


@dataclass(frozen=True, slots=True)
class Load:
    """Results of a server under load."""

    rate: float  # seconds of audio per second that clients received
    cores: float  # processor time of the server's processes per second

    @property
    def cost(self) -> float:
        """Core-seconds for a second of audio."""
        return self.cores / self.rate if self.rate else math.inf


def load(server: Server, streams: int, span_s: float, warm_up_s: float) -> Load:
    """Load a server for some time, of which the warm-up is not counted."""
    begins_s = time.monotonic() + warm_up_s
    ends_s = begins_s + span_s
    with ThreadPoolExecutor(streams) as pool:
        heard = pool.map(partial(_heard_s, server.address, begins_s, ends_s), range(streams))
        time.sleep(warm_up_s)
        before_s = sum(map(cpu_s, server.pids))
        time.sleep(max(0.0, ends_s - time.monotonic()))
        used_s = sum(map(cpu_s, server.pids)) - before_s
        return Load(sum(heard) / span_s, used_s / span_s)


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
    servers: tuple[Server, Server],
    replicas: int,
    repeat: int,
    streams: int = STREAMS,
    span_s: float = SPAN_S,
    warm_up_s: float = WARM_UP_S,
) -> Report:
    """Measure the server with one engine and that with replicas, alternately."""
    pairs = [[load(each, streams, span_s, warm_up_s) for each in servers] for _ in range(repeat)]
    figures = []
    names = "one engine", f"{replicas} replicas"
    for name, loads in zip(names, zip(*pairs, strict=True), strict=True):
        label = f"{streams} streams, {name}"
        cores = ", ".join(f"{each.cores:.2f}" for each in loads)
        rates, costs = tuple(e.rate for e in loads), tuple(e.cost for e in loads)
        figures.append(Figure(label, rates, "x real time", note=f"on {cores} cores"))
        figures.append(Figure(f"{label}: a second of audio", costs, "core-seconds"))
    gain = Figure(
        f"{replicas} replicas against one engine",
        tuple(several.rate / one.rate for one, several in pairs),
        "times",
        BAR if replicas == 2 else None,
        at_least=True,
        note="pairs of runs",
    )
    return Report("replicas", (*figures, gain))


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Audio per second of one engine and of replicas.", repeat=3)
    parser.add_argument("--replicas", type=int, default=2, help="engines of the second server")
    parser.add_argument("--streams", type=int, default=STREAMS, help="clients")
    args = parser.parse_args(argv)
    flags = ["--replicas", str(args.replicas)]
    with serving(args.model) as one, serving(args.model, flags) as several:
        return publish(measure((one, several), args.replicas, args.repeat, args.streams))


if __name__ == "__main__":
    sys.exit(main())
