"""Memory of a server's processes: when ready, and idle again after requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import Server, SpeechClient, serving

BAR_GB = 1.2
SETTLE_S = 1.0
TEXT = "The lamp by the window flickered twice, and then the room was dark. There was no sound."


def measure(server: Server, client: SpeechClient, repeat: int, text: str = TEXT) -> Report:
    """Measure resident memory right after the start, and idle after each of `repeat` requests."""
    ready = server.resident_bytes()
    idle = []
    for seed in range(repeat):
        client.synthesize(text, seed=seed)
        time.sleep(SETTLE_S)
        idle.append(server.resident_bytes())
    return Report(
        "memory",
        (
            Figure("ready, before the first request", (ready / 1e9,), "GB resident", bar=BAR_GB),
            Figure("idle, after speaking", tuple(n / 1e9 for n in idle), "GB resident", bar=BAR_GB),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments("Resident memory of the serving processes.", repeat=3).parse_args(argv)
    with serving(args.model) as server, SpeechClient(server.address) as client:
        return publish(measure(server, client, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
