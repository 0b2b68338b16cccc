"""Audio per second of streams that begin together, with one engine and with several replicas.

Two servers of `python -m tts.serve` are on the same cores and are loaded in turn; the clients are
in this process. With `--share` the server with one engine has only a replica's share of the cores.
Where others use the cores, too, the processor time for a second of audio says more than the rate.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.idle import cpu_s
from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import Server, SpeechClient, serving

STREAMS = 8
WARM_UP = "Hello."
BAR = 1.6  # two replicas against one engine
TEXT = (
    "The ferry leaves at noon and returns before dark. Bring a coat, because the wind is cold on "
    "the water, and something to eat. We will meet you at the harbor."
)


@dataclass(frozen=True, slots=True)
class Load:
    """Results of a server under load."""

    audio_s: float
    wall_s: float  # until the last stream has ended
    used_s: float  # processor time of the server's processes

    @property
    def rate(self) -> float:
        """Seconds of audio per second."""
        return self.audio_s / self.wall_s

    @property
    def cost(self) -> float:
        """Core-seconds for a second of audio."""
        return self.used_s / self.audio_s


def load(server: Server, streams: int, text: str = TEXT) -> Load:
    """Speak a text in several streams at once, each with a seed of its own."""
    before_s, started_s = sum(map(cpu_s, server.pids)), time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        audio_s = sum(pool.map(partial(_spoken_s, server.address, text), range(streams)))
    wall_s = time.monotonic() - started_s
    return Load(audio_s, wall_s, sum(map(cpu_s, server.pids)) - before_s)


def _spoken_s(address: str, text: str, seed: int) -> float:
    with SpeechClient(address) as client:
        return client.synthesize(text, seed=seed).seconds


def measure(
    servers: tuple[Server, Server],
    replicas: int,
    repeat: int,
    streams: int = STREAMS,
    text: str = TEXT,
) -> Report:
    """Measure the server with one engine and that with replicas, alternately.

    A first text for each stream warms up and is not counted.
    """
    for server in servers:
        load(server, streams, WARM_UP)
    pairs = [[load(each, streams, text) for each in servers] for _ in range(repeat)]
    figures = []
    names = "one engine", f"{replicas} replicas"
    for name, loads in zip(names, zip(*pairs, strict=True), strict=True):
        label = f"{streams} streams, {name}"
        cores = ", ".join(f"{each.used_s / each.wall_s:.2f}" for each in loads)
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


@contextmanager
def on_share(count: int) -> Iterator[None]:
    """Start processes inside the block on one part in `count` of the cores, at least one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, len(cores) // count)])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Audio per second of one engine and of replicas.", repeat=3)
    parser.add_argument("--replicas", type=int, default=2, help="engines of the second server")
    parser.add_argument("--streams", type=int, default=STREAMS, help="clients")
    text = "run the one engine on a replica's share of the cores"
    parser.add_argument("--share", action="store_true", help=text)
    args = parser.parse_args(argv)
    flags = ["--replicas", str(args.replicas)]
    with ExitStack() as stack:
        with on_share(args.replicas if args.share else 1):
            one = stack.enter_context(serving(args.model))
        several = stack.enter_context(serving(args.model, flags))
        return publish(measure((one, several), args.replicas, args.repeat, args.streams))


if __name__ == "__main__":
    sys.exit(main())
