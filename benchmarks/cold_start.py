"""Time of a fresh `python -m tts.say` until the file is written, with imports, and the processor
time that it takes, and a server that is started and stopped.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Figure, Report, arguments, publish
from tests.speech_server import serving

BAR_S = 4.0
TEXT = "hello"


class Cost(NamedTuple):
    """Seconds of some processes: by the clock, and of the processor."""

    wall_s: float
    processor_s: float


def cost_of(work: Callable[[], None]) -> Cost:
    """Measure work that runs processes to their ends."""
    started, spent_s = time.perf_counter(), _spent_s()
    work()
    return Cost(time.perf_counter() - started, _spent_s() - spent_s)


def _spent_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def say(text: str, model: str, folder: Path) -> None:
    """Run one process that writes one file."""
    out = folder / "cold.wav"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tts.say", text, "-o", str(out), "-q"]
    if model:
        command += ["--model", model]
    subprocess.run(command, check=True)
    if not out.stat().st_size:
        raise RuntimeError("the process ended well, but its file is empty")


def serve(model: str) -> None:
    """Run a server until it is ready."""
    with serving(model):
        pass


def measure(model: str, repeat: int, text: str = TEXT) -> Report:
    """Measure the first process (files may come from the disk), later ones, and servers."""
    with tempfile.TemporaryDirectory() as folder:
        first, *later = (
            cost_of(partial(say, text, model, Path(folder))) for _ in range(repeat + 1)
        )
    servers = [cost_of(partial(serve, model)) for _ in range(repeat)]
    return Report(
        "cold start",
        (
            Figure("first process", (first.wall_s,), "s", note="files may not be cached yet"),
            Figure(
                "cold process, file written", tuple(one.wall_s for one in later), "s", bar=BAR_S
            ),
            Figure("cold process: processor", tuple(one.processor_s for one in later), "s"),
            Figure(
                "server, started and stopped: processor",
                tuple(one.processor_s for one in servers),
                "s",
            ),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Seconds of a cold tts.say, and of a server's start.", repeat=5)
    options.add_argument("--text", default=TEXT)
    args = options.parse_args(argv)
    return publish(measure(args.model, args.repeat, args.text))


if __name__ == "__main__":
    sys.exit(main())
