"""Latency of the IPC between front end and engine: time to first audio with and without it.

Two servers of the same model run at the same time and get the same requests in turn: one has its
engine in the gRPC process (`--front-ends 0`), the other in another process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.first_audio import TEXTS, WARM_UP
from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import SpeechClient, serving

BAR_MS = 1.0
IN_PROCESS = ("--front-ends", "0")


def first_audio_ms(client: SpeechClient, number: int, texts: Sequence[str]) -> float:
    """Return the time to first audio of the request with this number."""
    return 1000 * client.synthesize(texts[number % len(texts)], seed=100 + number).first_audio_s


def measure(
    inside: SpeechClient, behind: SpeechClient, repeat: int, texts: Sequence[str] = TEXTS
) -> Report:
    """Send pairs of requests, one to each server, in alternating order."""
    pairs = []
    for number in range(-WARM_UP, repeat):
        first, second = (inside, behind) if number % 2 else (behind, inside)
        times = {client: first_audio_ms(client, number, texts) for client in (first, second)}
        if number >= 0:
            pairs.append((times[inside], times[behind]))
    added = tuple(far - near for near, far in pairs)
    return Report(
        "ipc_latency",
        (
            Figure("time to first audio, one process", tuple(near for near, _ in pairs), "ms"),
            Figure("time to first audio, two processes", tuple(far for _, far in pairs), "ms"),
            Figure("added by the hop", added, "ms", BAR_MS, note="median of pairs"),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Milliseconds that the engine's own process adds.", repeat=40).parse_args(argv)
    with (
        serving(args.model, IN_PROCESS) as near,
        serving(args.model) as far,
        SpeechClient(near.address) as inside,
        SpeechClient(far.address) as behind,
    ):
        return publish(measure(inside, behind, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
