"""A trial on the GPUs that are there: synthesis on all of them, then one design on each.

    python -m training.speech_codec.trial --teacher DIR --package DIR --phonemes DIR --out DIR \
        --designs source_free --minutes 20 --synthesis 180

Every process has its log in OUT/logs; OUT/status holds one word: synthesis, training, done or
failed. A design beyond the number of GPUs is left out. What comes after `--` goes to every
`training.speech_codec.train`.

With --voice the encoders of --start stay as they are, takes are tokenised while they are made
(OUT/tokens), and then the first GPU trains the one design's decoder on and the last one the
language model (OUT/lm); what comes after a second `--` goes to `training.speech_lm.train`.
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

from training.kokoro.convert import VOICES_FILE
from training.speech_codec.config import DESIGNS, save_config

FINISHED = "finished"  # next to takes or tokens: no more will come
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

    def wait(self, kind: str = "") -> None:
        """Until all whose names begin with `kind` have ended, even when one fails. Raises
        TrialError."""
        failed = []
        while waited := [name for name in self._running if name.startswith(kind)]:
            time.sleep(LOOK_EVERY_S)
            for name in waited:
                process = self._running[name]
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


def tokenising(args: argparse.Namespace, gpus: int) -> Iterator[tuple[str, int, list[object]]]:
    """Name, GPU and arguments of a tokeniser on every GPU."""
    design = args.designs[0]
    weights, config = start_of(args.start, design), args.out / f"{design}.json"
    save_config(DESIGNS[design], config)
    for number in range(gpus):
        yield f"tokenise{number}", number, [
            "--takes", args.out / "takes", "--weights", weights, "--config", config,
            "--out", args.out / "tokens", "--until", args.out / "takes" / FINISHED,
            "--share", number, gpus,
        ]  # fmt: skip


def language_model(args: argparse.Namespace) -> list[object]:
    """Its arguments: it starts in parallel with the synthesis, and ends with the trial."""
    return [
        "--tokens", args.out / "tokens", "--phonemes", args.phonemes, "--package", args.package,
        "--voices", args.teacher / VOICES_FILE, "--config", args.out / f"{args.designs[0]}.json",
        "--out", args.out / "lm", "--after", args.out / "tokens" / FINISHED,
        "--minutes", f"{args.minutes - MARGIN_S / 60:.2f}", *args.rest_lm,
    ]  # fmt: skip


def record(args: argparse.Namespace, processes: Processes, gpus: int) -> None:
    """Synthesis, and with --voice tokens of it. Raises TrialError where there are no takes."""
    (args.out / "takes").mkdir(exist_ok=True)
    for name, gpu, arguments in synthesis(args, gpus):
        processes.start(name, gpu, "training.kokoro.studio", arguments)
    if args.voice:
        for name, gpu, arguments in tokenising(args, gpus):
            processes.start(name, gpu, "training.speech_codec.tokenise", arguments)
        processes.start("lm", gpus - 1, "training.speech_lm.train", language_model(args))
    for kind, folder in (("studio", "takes"), ("tokenise", "tokens"))[: 2 if args.voice else 1]:
        try:
            processes.wait(kind)
        except TrialError as error:
            print(f"going on with the {folder} that are there\n{error}", flush=True)
        (args.out / folder).mkdir(exist_ok=True)
        (args.out / folder / FINISHED).touch()
    if not list((args.out / "takes").glob("take_*[0-9].npz")):
        processes.wait()
        raise TrialError("there are no takes")


def run(args: argparse.Namespace) -> None:
    """Both parts. Raises TrialError."""
    began, gpus = time.monotonic(), max(1, torch.cuda.device_count())
    print(f"{gpus} GPUs ({torch.cuda.device_count()} seen), designs {args.designs}", flush=True)
    processes = Processes(args.out)
    say(args.out, "synthesis")
    record(args, processes, gpus)
    minutes = args.minutes - (time.monotonic() - began + MARGIN_S) / 60
    say(args.out, "training")
    for gpu, design in enumerate(args.designs[:gpus]):
        arguments: list[object] = ["--design", design, "--takes", args.out / "takes"]
        arguments += ["--out", args.out / "codec", "--minutes", f"{max(minutes, 0.2):.2f}"]
        if args.start:
            arguments += ["--start", start_of(args.start, design)]
        arguments += ["--frozen-encoders"] if args.voice else []
        arguments += args.rest
        processes.start(f"train_{design}", gpu, "training.speech_codec.train", arguments)
    processes.wait()


def start_of(given: Path, design: str) -> Path:
    """The weights that a design continues: of a folder its own, otherwise the file."""
    return given / f"{design}.safetensors" if given.is_dir() else given


def say(out: Path, word: str) -> None:
    """Where the trial is."""
    (out / "status").write_text(word + "\n")
    print(time.strftime("%H:%M:%S"), word, flush=True)


def parts_of(given: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """What stands before the first `--`, before the second, and after it."""
    parts: list[list[str]] = [[]]
    for word in given:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    own, rest, rest_lm = (*parts, [], [])[:3]
    return own, rest, rest_lm


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "package", "phonemes", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--start",
        type=Path,
        help="weights to continue: a folder of DESIGN.safetensors, or one file for all designs",
    )
    parser.add_argument("--designs", nargs="+", choices=sorted(DESIGNS), default=["source_free"])
    parser.add_argument("--voice", action="store_true", help="a language model, and one decoder")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the whole")
    parser.add_argument("--synthesis", type=float, default=180.0, help="seconds")
    parser.add_argument("--studios", type=int, default=2, help="processes per GPU")
    parser.add_argument("--sessions", type=int, default=60, help="per take")
    parser.add_argument("--lines", type=int, default=8, help="per session")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    own, rest, rest_lm = parts_of(given)
    args = parser.parse_args(own)
    args.rest, args.rest_lm = rest, rest_lm
    if args.voice and (args.start is None or len(args.designs) != 1):
        parser.error("--voice needs --start and one design")
    for design in args.designs if args.start else ():
        if not start_of(args.start, design).is_file():
            parser.error(f"--start: {start_of(args.start, design)} is not there")
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
