"""Time to first audio over loopback gRPC, warm, with short sentences."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import SpeechClient, serving

BAR_MS = 200.0
WARM_UP = 3
TEXTS = (  # 60 characters each
    "The train to the coast leaves from platform eleven at seven.",
    "Please leave that parcel with my neighbor if I am not there.",
    "We painted the kitchen yellow, and now it looks much bigger.",
    "She wrote the answers on the back of an old concert program.",
)


def measure(client: SpeechClient, repeat: int, texts: Sequence[str] = TEXTS) -> Report:
    """Send requests one after the other, with the texts in turn and a seed per request."""
    for number in range(WARM_UP):
        client.synthesize(texts[number % len(texts)], seed=number)
    speeches = [
        client.synthesize(texts[number % len(texts)], seed=100 + number) for number in range(repeat)
    ]
    first_ms = tuple(1000 * speech.first_audio_s for speech in speeches)
    return Report(
        "first audio",
        (
            Figure("time to first audio", first_ms, "ms", bar=BAR_MS, note="60 characters, warm"),
            Figure("audio of one request", tuple(s.seconds for s in speeches), "s"),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Milliseconds to the first audio over loopback gRPC.", repeat=20).parse_args(
        argv
    )
    with serving(args.model) as server, SpeechClient(server.address) as client:
        return publish(measure(client, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
