"""Time of a fresh `python -m tts.say` until the file is written, with imports."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, Report, arguments, publish

BAR_S = 4.0
TEXT = "hello"


def cold_start_s(text: str, model: str, folder: Path) -> float:
    """Return the wall-clock seconds of one process that writes one file."""
    out = folder / "cold.wav"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tts.say", text, "-o", str(out), "-q"]
    if model:
        command += ["--model", model]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - started
    if not out.stat().st_size:
        raise RuntimeError("the process ended well, but its file is empty")
    return seconds


def measure(model: str, repeat: int, text: str = TEXT) -> Report:
    """Measure the first process (files may come from the disk) and later ones."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = [cold_start_s(text, model, Path(folder)) for _ in range(repeat + 1)]
    first, *later = seconds
    return Report(
        "cold start",
        (
            Figure("first process", (first,), "s", note="files may not be cached yet"),
            Figure("cold process, file written", tuple(later), "s", bar=BAR_S),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments("Seconds of a cold tts.say until its file is written.", repeat=5)
    options.add_argument("--text", default=TEXT)
    args = options.parse_args(argv)
    return publish(measure(args.model, args.repeat, args.text))


if __name__ == "__main__":
    sys.exit(main())
