"""A trial on the GPUs that are there: synthesis on all of them, then one design on each.

    python -m training.speech_codec.trial --teacher DIR --package DIR --phonemes DIR --out DIR \
        --designs one two --minutes 20 --synthesis 180

Every process has its log in OUT/logs; OUT/status holds one word: synthesis, training, done or
failed. A design beyond the number of GPUs is left out. What comes after `--` goes to every
`training.speech_codec.train`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

MARGIN_S = 30.0  # of loading before and saving after training
LOOK_EVERY_S = 1.0


class TrialError(Exception):
    """A process failed; the message holds the end of its log."""


class Processes:
    """Children with logs, each on one GPU."""

    def __init__(self, out: Path) -> None:
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._running: dict[str, subprocess.Popen] = {}

    def start(self, name: str, gpu: int, module: str, arguments: Sequence[object]) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self.logs / f"{name}.log").open("w") as log:
            self._running[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Until all have ended, even when one fails. Raises TrialError."""
        failed = []
        while self._running:
            time.sleep(LOOK_EVERY_S)
            for name, process in list(self._running.items()):
                if process.poll() is not None:
                    del self._running[name]
                    failed += [name] if process.returncode else []
        if failed:
            ends = (self.end_of(name) for name in failed)
            raise TrialError("\n".join(ends))

    def end_of(self, name: str) -> str:
        """The last lines of a log."""
        text = (self.logs / f"{name}.log").read_text(errors="replace")
        return f"--- {name} failed:\n{text[-3000:]}"


def synthesis(args: argparse.Namespace, gpus: int) -> Iterator[tuple[str, int, list[object]]]:
    """Name, GPU and arguments of every studio."""
    for number in range(gpus * args.studios):
        yield f"studio{number}", number % gpus, [
            "--teacher", args.teacher, "--package", args.package, "--phonemes", args.phonemes,
            "--out", args.out / "takes", "--seconds", args.synthesis, "--seed", number,
            "--sessions", args.sessions, "--lines", args.lines,
        ]  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Both parts. Raises TrialError."""
    began, gpus = time.monotonic(), max(1, torch.cuda.device_count())
    print(f"{gpus} GPUs ({torch.cuda.device_count()} seen), designs {args.designs}", flush=True)
    processes = Processes(args.out)
    say(args.out, "synthesis")
    for name, gpu, arguments in synthesis(args, gpus):
        processes.start(name, gpu, "training.kokoro.studio", arguments)
    try:
        processes.wait()
    except TrialError as error:
        if not list((args.out / "takes").glob("take_*[0-9].npz")):
            raise
        print(f"going on with the takes that are there\n{error}", flush=True)
    minutes = args.minutes - (time.monotonic() - began + MARGIN_S) / 60
    say(args.out, "training")
    for gpu, design in enumerate(args.designs[:gpus]):
        arguments: list[object] = ["--design", design, "--takes", args.out / "takes"]
        arguments += ["--out", args.out / "codec", "--minutes", f"{max(minutes, 0.2):.2f}"]
        if args.start:
            arguments += ["--start", args.start / f"{design}.safetensors"]
        arguments += args.rest
        processes.start(f"train_{design}", gpu, "training.speech_codec.train", arguments)
    processes.wait()


def say(out: Path, word: str) -> None:
    """Where the trial is."""
    (out / "status").write_text(word + "\n")
    print(time.strftime("%H:%M:%S"), word, flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "package", "phonemes", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="folder of weights to go on from")
    parser.add_argument("--designs", nargs="+", default=["one", "two"])
    parser.add_argument("--minutes", type=float, default=20.0, help="of the whole")
    parser.add_argument("--synthesis", type=float, default=180.0, help="seconds")
    parser.add_argument("--studios", type=int, default=2, help="processes per GPU")
    parser.add_argument("--sessions", type=int, default=60, help="per take")
    parser.add_argument("--lines", type=int, default=8, help="per session")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    args = build_parser().parse_args(given[:at])
    args.rest = given[at + 1 :]
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        run(args)
    except TrialError as error:
        print(error, flush=True)
        say(args.out, "failed")
        return 1
    say(args.out, "done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
