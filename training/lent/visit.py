"""One visit to a machine with GPUs: speech and plans of the teacher, codes, and all that learns.

    python -m training.lent.visit --teacher DIR --package DIR --phonemes DIR --out DIR --minutes 26

    takes  (studios)   --------------------------------> decoder ... to the end
    plans  (planners)  ---> codes (coder) ---> tokens --> language model --> encoder of voices

Everything is in OUT: takes, plans, coder, tokens, codec, lm, and every process's log in logs; with
--clips FILE (lines that `training.speech_codec.clips --spell` wrote) clips to judge the codec by.
OUT/status holds one word: synthesis, training, done or failed. The decoder learns on the first GPU,
all else on the last one; studios speak on all but the last one of several. With --coder FILE codes
are those of an earlier visit; with --reader FILE, too, the coder learns the symbols that English
lacks, and codes of English stay what they are. --start and --lm-start continue a decoder and a
language model (or that of an exported voice). With --only-lm there are plans and the language
model, no sound; planners then may be on the last --planner-gpus GPUs, with a process that writes
tokens on each.
What comes after `--` goes to `training.speech_codec.train`, after a second `--` to
`training.speech_lm.train`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from training.kokoro.convert import VOICES_FILE
from training.kokoro.phonemes import SPANISH, table
from training.kokoro.style import NAMED_SHARE
from training.speech_codec.config import DESIGNS, save_config

FINISHED = "finished"  # next to plans or tokens: no more will come
MARGIN_S = 25.0  # of saving, after training
LOOK_EVERY_S = 0.5
LEAST_MINUTES = 0.05


class VisitError(Exception):
    """A process failed; the message holds the end of its log."""


class Processes:
    """Children with logs, each on one GPU."""

    def __init__(self, out: Path) -> None:
        self.logs = out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._started: dict[str, subprocess.Popen] = {}

    def start(self, name: str, gpu: int, module: str, arguments: Sequence[object]) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self.logs / f"{name}.log").open("w") as log:
            self._started[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def are_running(self, kind: str) -> bool:
        """Return whether any process runs whose name begins with `kind`."""
        return any(
            process.poll() is None
            for name, process in self._started.items()
            if name.startswith(kind)
        )

    def wait(self, kind: str = "") -> None:
        """Wait until all whose names begin with `kind` have ended, even when one fails.

        Raises VisitError.
        """
        while self.are_running(kind):
            time.sleep(LOOK_EVERY_S)
        ended = [name for name in self._started if name.startswith(kind)]
        failed = [name for name in ended if self._started.pop(name).returncode]
        if failed:
            raise VisitError("\n".join(map(self.end_of, failed)))

    def stop(self, kind: str = "") -> None:
        """End all whose names begin with `kind` and that still run; how they ended is no matter."""
        ended = [self._started.pop(name) for name in [*self._started] if name.startswith(kind)]
        for process in ended:
            process.terminate()
        for process in ended:
            process.wait()

    def end_of(self, name: str) -> str:
        """The last lines of a log."""
        text = (self.logs / f"{name}.log").read_text(errors="replace")
        return f"--- {name} failed:\n{text[-3000:]}"


class Visit:
    """The course of a visit; every step raises VisitError."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.began, self.gpus = time.monotonic(), num_gpus()
        self.processes = Processes(args.out)
        self.takes, self.plans = args.out / "takes", args.out / "plans"
        self.coder = args.out / "coder" / "coder.safetensors"
        self.config = args.out / f"{args.design}.json"
        self.voices = args.teacher / VOICES_FILE
        save_config(DESIGNS[args.design], self.config)

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def left_minutes(self) -> float:
        """Return what is left of the whole visit."""
        return max(LEAST_MINUTES, self.args.minutes - (self.passed + MARGIN_S) / 60)

    def run(self) -> None:
        """All of it."""
        say(self.out, "synthesis")
        self._speak()
        if not self.args.no_lm:
            self._start_language_model()
        self._write_codes()
        self.processes.wait("studio")
        if self.args.only_lm:
            self._tokenise()
            say(self.out, "training")
            self.processes.wait()
            return
        if not self._finished(self.takes):
            raise VisitError("there are no takes")
        say(self.out, "training")
        self._start_clips()
        self._start_decoder()
        try:
            self._tokenise()
            self.processes.wait("lm")
        except VisitError as error:  # the decoder continues
            print(f"without a language model: {error}", flush=True)
            for kind in ("tokenise", "lm"):  # they wait for files that do not come
                self.processes.stop(kind)
        if self.args.voices_minutes:
            self._start_voices()
        self.processes.wait()

    def _studio(self, name: str, gpu: int, seed: int, arguments: Sequence[object]) -> None:
        args = self.args
        self.processes.start(name, gpu, "training.kokoro.studio", [
            "--teacher", args.teacher, "--package", args.package, "--phonemes", args.phonemes,
            "--seed", seed, "--lines", args.lines, "--named", args.named,
            "--spanish", args.spanish, *arguments,
        ])  # fmt: skip

    def _speak(self) -> None:
        """Takes, and plans, which need a fifteenth of the work."""
        args = self.args
        self.takes.mkdir(exist_ok=True)
        self.plans.mkdir(exist_ok=True)
        speaking = max(1, self.gpus - 1)
        for number in range(0 if args.only_lm else speaking * args.studios):
            self._studio(f"studio{number}", number % speaking, args.seed + number, [
                "--out", self.takes, "--seconds", args.synthesis, "--sessions", args.sessions,
            ])  # fmt: skip
        for number in range(args.planners):
            gpu, seed = self._planning_gpu(number), 1000 + args.seed + number
            self._studio(f"planner{number}", gpu, seed, [
                "--out", self.plans, "--seconds", args.planning, "--sessions", args.sessions,
                "--silent",
            ])  # fmt: skip

    def _planning_gpu(self, number: int) -> int:
        """One of the last `planner_gpus` ones, in turn."""
        return self.gpus - 1 - number % self.args.planner_gpus

    def _start_language_model(self) -> None:
        """It compiles while there is nothing to learn yet, and begins when all tokens are there."""
        args = self.args
        start = ["--start", args.lm_start] if args.lm_start else []
        self.processes.start("lm", self.gpus - 1, "training.speech_lm.train", [
            "--tokens", self.out / "tokens", "--phonemes", args.phonemes,
            "--package", args.package, "--voices", self.voices, "--config", self.config,
            "--out", self.out / "lm", "--after", self.out / "tokens" / FINISHED,
            "--minutes", f"{min(args.lm_minutes, self.left_minutes()):.2f}", *start, *args.rest_lm,
        ])  # fmt: skip

    def _write_codes(self) -> None:
        """The coder, of an earlier visit or from the plans of the first seconds, or both."""
        args = self.args
        self.coder.parent.mkdir(exist_ok=True)
        if args.coder and not args.reader:
            shutil.copy(args.coder, self.coder)
            return
        known = ["--coder", args.coder, "--reader", args.reader, "--new-symbols", args.package]
        while self.processes.are_running("planner") and (
            self.passed < args.coder_after or not self._finished(self.plans)
        ):
            time.sleep(LOOK_EVERY_S)
        if not self._finished(self.plans):
            self.processes.wait("planner")
            raise VisitError("there are no plans")
        self.processes.start("coder", self.gpus - 1, "training.speech_codec.train_coder", [
            "--plans", self.plans, "--voices", self.voices, "--out", self.coder.parent,
            "--design", args.design, "--minutes", args.coder_minutes, "--batch", args.coder_batch,
            *(known if args.coder else ()),
        ])  # fmt: skip
        self.processes.wait("coder")

    @staticmethod
    def _finished(folder: Path) -> list[Path]:
        """Return the takes or plans that are written."""
        return list(folder.glob("*[0-9].npz"))

    def _start_clips(self) -> None:
        args = self.args
        if args.clips:
            self.processes.start("clips", self.gpus - 1, "training.speech_codec.clips", [
                "--teacher", args.teacher, "--spelled", args.clips, "--out", self.out / "clips",
            ])  # fmt: skip

    def _start_decoder(self) -> None:
        args = self.args
        start = ["--start", args.start] if args.start else []
        self.processes.start("decoder", 0, "training.speech_codec.train", [
            "--design", args.design, "--takes", self.takes, "--coder", self.coder,
            "--out", self.out / "codec",
            "--minutes", f"{self.left_minutes():.2f}",
            *start, *args.rest,
        ])  # fmt: skip

    def _tokenise(self) -> None:
        """Write the tokens of all plans as they come; the language model waits for them."""
        parts = self.args.planner_gpus
        for part in range(parts):
            gpu = self._planning_gpu(part)
            self.processes.start(f"tokenise{part}", gpu, "training.speech_codec.tokenise", [
                "--plans", self.plans, "--coder", self.coder, "--design", self.args.design,
                "--out", self.out / "tokens", "--until", self.plans / FINISHED,
                "--part", part, "--parts", parts, "--emphasis", self.args.emphasis,
            ])  # fmt: skip
        self.processes.wait("planner")
        (self.plans / FINISHED).touch()
        self.processes.wait("tokenise")
        (self.out / "tokens" / FINISHED).touch()

    def _start_voices(self) -> None:
        minutes = min(self.args.voices_minutes, self.left_minutes())
        self.processes.start("voices", self.gpus - 1, "training.speech_codec.train_voices", [
            "--takes", self.takes, "--coder", self.coder, "--design", self.args.design,
            "--out", self.out / "codec", "--minutes", f"{minutes:.2f}",
        ])  # fmt: skip


def num_gpus() -> int:
    """Return the number of this machine's GPUs; one without any computes as if it had one."""
    return max(1, torch.cuda.device_count())


def say(out: Path, word: str) -> None:
    """Write and print where the visit is."""
    (out / "status").write_text(word + "\n")
    print(time.strftime("%H:%M:%S"), word, flush=True)


def parts_of(given: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the words before the first `--`, before the second, and after it."""
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
    parser.add_argument("--coder", type=Path, help="codes of an earlier visit")
    parser.add_argument("--reader", type=Path, help="that reads them; new symbols are learned")
    parser.add_argument("--start", type=Path, help="a decoder to continue")
    parser.add_argument("--lm-start", type=Path, help="a language model to continue")
    parser.add_argument("--clips", type=Path, help="spelled lines of clips to make")
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_ahead")
    parser.add_argument("--no-lm", action="store_true", help="without a language model")
    parser.add_argument("--only-lm", action="store_true", help="a language model and its plans")
    parser.add_argument("--minutes", type=float, default=26.0, help="of the whole")
    parser.add_argument("--synthesis", type=float, default=170.0, help="seconds of takes")
    parser.add_argument("--planning", type=float, default=190.0, help="seconds of plans")
    parser.add_argument("--coder-after", type=float, default=60.0, help="seconds")
    parser.add_argument("--coder-minutes", type=float, default=3.0)
    parser.add_argument("--coder-batch", type=int, default=192)
    parser.add_argument("--lm-minutes", type=float, default=16.0, help="from the beginning on")
    parser.add_argument("--voices-minutes", type=float, default=3.0, help="0: leave it out")
    parser.add_argument("--studios", type=int, default=2, help="processes per GPU that speaks")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first studio, below 1000; planners add it to 1000",
    )
    parser.add_argument("--planners", type=int, default=2, help="processes")
    parser.add_argument("--planner-gpus", type=int, default=1, help="the last ones")
    parser.add_argument("--sessions", type=int, default=60, help="per take")
    parser.add_argument(
        "--named", type=float, default=NAMED_SHARE, help="of sessions: named voices"
    )
    parser.add_argument("--spanish", type=float, default=0.0, help="of sessions: Spanish lines")
    parser.add_argument("--lines", type=int, default=8, help="per session")
    parser.add_argument(
        "--emphasis", type=float, default=0.0, help="semitones by which rising questions rise more"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 1 failed."""
    own, rest, rest_lm = parts_of(list(sys.argv[1:] if argv is None else argv))
    parser = build_parser()
    args = parser.parse_args(own)
    if not 1 <= args.planner_gpus <= num_gpus():
        parser.error(f"--planner-gpus {args.planner_gpus}: this machine has {num_gpus()} GPUs")
    if args.reader and not args.coder:
        parser.error("--reader: it needs --coder")
    if args.spanish and not table(args.phonemes, SPANISH).exists():
        parser.error(f"--spanish: there is no {table(args.phonemes, SPANISH)}")
    args.rest, args.rest_lm = rest, rest_lm
    args.out.mkdir(parents=True, exist_ok=True)
    visit = Visit(args)
    try:
        visit.run()
    except VisitError as error:
        print(error, flush=True)
        say(args.out, "failed")
        return 1
    finally:
        visit.processes.stop()
    say(args.out, "done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
