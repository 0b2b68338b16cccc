"""Processor time of an idle server: all its processes, and each."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import Server, SpeechClient, serving

BAR_PERCENT = 2.0  # of one core
SETTLE_S, WINDOW_S = 1.0, 5.0


def cpu_s(pid: int) -> float:
    """Return the processor time of all threads of a process in seconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def load_percent(server: Server, window_s: float) -> tuple[float, ...]:
    """Return the percentage of one core per process: the supervisor, then the engine and front
    ends.
    """
    pids = server.pids
    before, started = [cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(window_s)
    wall_s = time.monotonic() - started
    return tuple(100 * (cpu_s(pid) - b) / wall_s for pid, b in zip(pids, before, strict=True))


def measure(server: Server, repeat: int, window_s: float = WINDOW_S) -> Report:
    """Measure with a connected client that is idle after one request."""
    with SpeechClient(server.address) as client:
        client.synthesize("Hello.")
        time.sleep(SETTLE_S)
        windows = [load_percent(server, window_s) for _ in range(repeat)]
    total = tuple(sum(window) for window in windows)
    supervisor, engine, *front_ends = zip(*windows, strict=True)
    return Report(
        "idle",
        (
            Figure("all processes", total, "% of a core", BAR_PERCENT),
            Figure("supervisor", supervisor, "% of a core"),
            Figure("engine", engine, "% of a core"),
            *(Figure("front end", values, "% of a core") for values in front_ends),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Processor time of an idle server.", repeat=5)
    parser.add_argument("--all-ports", action="store_true", help="with HTTP and Wyoming")
    args = parser.parse_args(argv)
    ports = ("--http-port=0", "--wyoming-port=0") if args.all_ports else ()
    with serving(args.model, ports) as server:
        return publish(measure(server, args.repeat))


if __name__ == "__main__":
    sys.exit(main())
