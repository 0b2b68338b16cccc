"""The whole recipe against the clock, on as many GPUs as there are.

    python -m training.run --corpus runs/corpus.txt --words runs/words.tsv --out runs --minutes 23

    |-- synthesis on all cores, until 76 % of the time --------------|
    |-- codec stage 1, all GPUs --|-- stage 2, the first half of them -----------|
                                  | tokenise | tokenise again | and again
                                             |-- aligner --|
                                             |-- language model, the other GPUs -|

Each stage is its own process with its own log in OUT/logs; weights are saved all along. With
--codec it goes on from a codec.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

STAGE1_END, SPEECH_END = 0.48, 0.76  # shares of the whole time
TOKENISE_AGAIN = (0.62, 0.77)
RESUMED_TOKENISE = (0.3, 0.5, 0.7)  # when the codec's first stage is there already
ALIGNER_SHARE = 0.05
COMPILE_S = 110.0  # the language model compiles this long before there are codes


class Recipe:
    """Starts stages and waits for their moments."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.total = args, args.minutes * 60
        self.gpus = torch.cuda.device_count()
        self.speech, self.logs = args.out / "speech", args.out / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.start = time.time()
        self.env = os.environ | {
            "RECIPE_START": str(self.start), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2",
            "TORCHINDUCTOR_COMPILE_THREADS": "8",
        }  # fmt: skip

    def spawn(self, name: str, module: str, *arguments: object, gpus: str = "", **env: str):
        command = [sys.executable, "-m", module, *map(str, arguments)]
        log = open(self.logs / f"{name}.log", "w")  # noqa: SIM115 (the child's for its life)
        visible = {"CUDA_VISIBLE_DEVICES": gpus}
        return subprocess.Popen(command, env=self.env | visible | env, stdout=log, stderr=log)

    def spawn_group(self, name: str, module: str, *arguments: object, gpus: list[int]) -> list:
        """One process per GPU (one on the CPU when there is none)."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        size = max(1, len(gpus))
        visible = ",".join(map(str, gpus))
        return [
            self.spawn(
                f"{name}{rank}",
                module,
                *arguments,
                gpus=visible,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            for rank in range(size)
        ]

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, self.start + moment - time.time()))

    def tokenise(self, number: int, gpu: str) -> subprocess.Popen:
        out = self.args.out
        return self.spawn(
            f"codes{number}", "training.codes", "--speech", self.speech,
            "--codec", out / "codec_stage1.safetensors", "--out", out / f"codes{number}.npz",
            gpus=gpu,
        )  # fmt: skip

    def run(self) -> None:
        args, out, total = self.args, self.args.out, self.total
        everything = list(range(self.gpus))
        first = "0" if self.gpus else ""
        synthesis = self.spawn(
            "synthesis", "training.synthesize", "--corpus", args.corpus, "--out", self.speech,
            "--hours", args.hours, "--workers", args.workers, "--libraries", args.libraries,
            "--first-round", args.first_round,
        )  # fmt: skip
        if args.codec:
            self.resume(synthesis)
            return
        stage1_end = STAGE1_END * total
        reconstruct = self.spawn_group(
            "reconstruct", "training.codec", "reconstruct", "--speech", self.speech, "--out", out,
            "--until", stage1_end, "--min-hours", args.min_hours, "--batch", args.batch,
            gpus=everything,
        )  # fmt: skip
        self.wait_until(max(0.0, stage1_end - COMPILE_S))
        half = max(1, self.gpus // 2)
        judged, others = everything[:half], everything[half:] or everything
        model = self.language_model(others)
        for process in reconstruct:
            process.wait()
        adversarial = self.adversarial(out / "codec_stage1.safetensors", judged)
        self.tokenise(1, str(others[-1]) if others else "").wait()
        aligner = self.aligner(first)
        self.tokenise_at(TOKENISE_AGAIN, 2, others, synthesis)
        self.finish(*model, *adversarial, aligner)

    def language_model(self, gpus: list[int]) -> list:
        args = self.args
        words = ("--words", args.words) if args.words else ()
        return self.spawn_group(
            "language_model", "training.language_model", "--corpus", args.corpus,
            "--out", args.out, "--codes", args.out / "codes", "--until", self.total, *words,
            *args.model_options.split(), gpus=gpus,
        )  # fmt: skip

    def aligner(self, gpu: str) -> subprocess.Popen:
        until = time.time() - self.start + ALIGNER_SHARE * self.total
        return self.spawn(
            "aligner", "training.aligner", "--codes", self.args.out / "codes",
            "--out", self.args.out, "--until", until, gpus=gpu,
        )  # fmt: skip

    def adversarial(self, init: Path, gpus: list[int]) -> list:
        args = self.args
        return self.spawn_group(
            "adversarial", "training.codec", "adversarial", "--speech", self.speech,
            "--out", args.out, "--until", self.total, "--init", init, "--min-hours", 1,
            "--batch", max(1, args.batch // 2), gpus=gpus,
        )  # fmt: skip

    def tokenise_at(
        self, shares: tuple[float, ...], number: int, gpus: list[int], synthesis: subprocess.Popen
    ) -> None:
        for i, share in enumerate(shares):
            self.wait_until(share * self.total)
            if share >= SPEECH_END or i == len(shares) - 1:
                (self.speech / "STOP").touch()
                synthesis.wait()
            self.tokenise(number + i, str(gpus[-1]) if gpus else "").wait()

    def finish(self, *processes: subprocess.Popen) -> None:
        for process in processes:
            process.wait()
        (self.args.out / "DONE").touch()

    def resume(self, synthesis: subprocess.Popen) -> None:
        """Go on from a codec (its encoder is frozen) and, with --model-options, from a model."""
        args, out = self.args, self.args.out
        gpus = list(range(self.gpus))
        half = max(1, self.gpus // 2)
        others = gpus[half:] or gpus
        shutil.copy(args.codec, out / "codec_stage1.safetensors")
        adversarial = self.adversarial(args.codec, gpus[:half])
        model = self.language_model(others)
        self.tokenise_at(RESUMED_TOKENISE, 1, others, synthesis)
        self.finish(*model, *adversarial, self.aligner("0" if gpus else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--words", type=Path, help="words.tsv of training.lexicon")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=24.0)
    parser.add_argument("--hours", type=float, default=1500.0, help="of speech, at most")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 6))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--min-hours", type=float, default=12.0)
    parser.add_argument("--libraries", default="")
    parser.add_argument("--codec", type=Path, help="go on from this codec instead of stage 1")
    parser.add_argument("--first-round", type=int, default=0, help="see training.synthesize")
    parser.add_argument("--model-options", default="", help="for training.language_model")
    Recipe(parser.parse_args()).run()


if __name__ == "__main__":
    main()
