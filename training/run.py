"""The whole recipe, from text to a voice checkpoint.

    python -m training.run --out runs                     one stage after the other
    python -m training.run --out runs --together          against the clock, on several GPUs
    python -m training.run --out runs --voice FOLDER      a voice's language model alone, again

Numbers are those of `recipe.toml`, of `--config FILE` and of `--set section.key=value`, and are
stored in OUT/recipe.toml. A stage with complete output is not run again, except with --fresh.

    corpus, words, synthesis, reconstruct, adversarial, codes, language_model, aligner, voice,
    evaluation (with --evaluate)

Every stage is a process with its own log in OUT/logs, unless with --here. See `training.together`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.codes import part_files
from training.recipe import Recipe, RecipeError, load_recipe, write_recipe
from training.stages import Launcher, Stage, StageError, is_done, run_here

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Plan:
    """Commands of all stages. `until` is in seconds on the clock of that stage."""

    out: Path
    recipe: Recipe
    evaluates: bool = False

    @property
    def corpus_file(self) -> Path:
        return self.out / "corpus.txt"

    @property
    def words_file(self) -> Path:
        return self.out / "words.tsv"

    @property
    def speech(self) -> Path:
        return self.out / "speech"

    @property
    def first_codec(self) -> Path:
        return self.out / "codec_stage1.safetensors"

    def _stage(self, name: str, module: str, output: Path, *arguments: object) -> Stage:
        config = ("--config", self.out / "recipe.toml")
        return Stage(name, f"training.{module}", (*arguments, *config), output)

    def corpus(self) -> Stage:
        return self._stage("corpus", "corpus", self.corpus_file, "--out", self.corpus_file)

    def words(self) -> Stage:
        return self._stage(
            "words", "lexicon", self.words_file, "--corpus", self.corpus_file,
            "--out", self.words_file,
        )  # fmt: skip

    def synthesis(self) -> Stage:
        return self._stage(
            "synthesis", "synthesize", self.speech / "000.done", "--corpus", self.corpus_file,
            "--out", self.speech,
        )  # fmt: skip

    def reconstruct(self, until: float) -> Stage:
        return self._stage(
            "reconstruct", "codec", self.first_codec, "reconstruct", "--speech", self.speech,
            "--out", self.out, "--until", until,
        )  # fmt: skip

    def adversarial(self, until: float) -> Stage:
        return self._stage(
            "adversarial", "codec", self.out / "codec.safetensors", "adversarial",
            "--speech", self.speech, "--out", self.out, "--until", until,
            "--init", self.first_codec,
        )  # fmt: skip

    def codes(self, number: int) -> Stage:
        part = self.out / f"codes{number}.npz"
        return self._stage(
            f"codes{number}", "codes", part, "--speech", self.speech, "--codec", self.first_codec,
            "--out", part,
        )  # fmt: skip

    def language_model(self, until: float) -> Stage:
        weights = self.out / "lm.safetensors"
        init = ("--init", weights) if weights.exists() else ()
        return self._stage(
            "language_model", "language_model", weights, "--corpus", self.corpus_file,
            "--out", self.out, "--codes", self.out / "codes", "--until", until,
            "--words", self.words_file, *init,
        )  # fmt: skip

    def aligner(self, until: float) -> Stage:
        return self._stage(
            "aligner", "aligner", self.out / "aligner.safetensors", "--codes", self.out / "codes",
            "--out", self.out, "--until", until,
        )  # fmt: skip

    def stand_in(self) -> None:
        """Use intermediate results of the codec's stages in place of missing outputs."""
        partial, first = self.out / "codec_stage1_partial.safetensors", self.first_codec
        for source, target in ((partial, first), (first, self.out / "codec.safetensors")):
            if source.exists() and not target.exists():
                shutil.copy(source, target)

    def voice(self) -> Stage:
        """Return the export stage, without word timings if there is no aligner."""
        out, aligner = self.out / "voice", self.out / "aligner.safetensors"
        timings = ("--aligner", aligner) if aligner.exists() else ()
        return self._stage(
            "voice", "export", out / "config.json", "--model", self.out / "lm.safetensors",
            "--codec", self.out / "codec.safetensors", "--out", out, *timings,
        )  # fmt: skip

    def evaluation(self) -> Stage:
        return self._stage(
            "evaluation", "assess", self.out / "evaluation.json", "--model", self.out / "voice",
            "--lines", self.corpus_file.with_name("corpus_held_out.txt"),
            "--words", self.words_file.with_name("words_held_out.tsv"),
            "--out", self.out / "evaluation.json",
        )  # fmt: skip

    def in_turn(self) -> Iterator[Stage]:
        """Iterate over all stages; the training stages have shares of the time."""
        seconds = [60 * self.recipe.schedule.minutes * x for x in self.recipe.schedule.in_turn]
        yield from (self.corpus(), self.words(), self.synthesis())
        yield from (self.reconstruct(seconds[0]), self.adversarial(seconds[1]), self.codes(1))
        yield from (self.language_model(seconds[2]), self.aligner(seconds[3]))
        yield self.voice()
        if self.evaluates:
            yield self.evaluation()


def run_in_turn(plan: Plan, *, here: bool) -> None:
    """Run one stage after the other, without finished ones. Raises StageError."""
    launcher = Launcher(plan.out)
    began = time.time()
    for stage in plan.in_turn():
        if is_done(stage):
            print(f"[{time.time() - began:7.1f}] {stage.name}: is there", flush=True)
            continue
        print(f"[{time.time() - began:7.1f}] {stage.name}", flush=True)
        if here:
            run_here(stage)
        else:
            launcher.start(stage, gpus="0").wait()


def prepare(plan: Plan, given: Mapping[str, Path], *, fresh: bool) -> None:
    """Use given files as outputs of their stages; `fresh`: remove all other outputs."""
    for stage in plan.in_turn():
        source = given.get(stage.name)
        if source is not None and source.resolve() != stage.output.resolve():
            shutil.copy(source, stage.output)
        elif fresh and source is None:
            stage.output.unlink(missing_ok=True)
    for part in part_files(plan.out / "codes") if fresh else ():
        part.unlink()


def kept_parts(voice: Path) -> dict[str, Path]:
    """Return the files that a run of the language model alone takes from a checkpoint, by stage.

    The codec's second stage does not change the encoder, so that its weights are used for both.
    """
    codec, aligner = voice / "codec" / WEIGHTS, voice / "aligner" / WEIGHTS
    return {"reconstruct": codec, "adversarial": codec, "aligner": aligner}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="values other than those of recipe.toml")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--minutes", type=float, help="short for --set schedule.minutes=…")
    parser.add_argument("--corpus", type=Path, help="this text, instead of making one")
    parser.add_argument("--words", type=Path, help="these words of training.lexicon")
    parser.add_argument("--codec", type=Path, help="continue from this first stage of a codec")
    parser.add_argument("--voice", type=Path, help="this voice's language model alone, again")
    parser.add_argument("--together", action="store_true", help="stages at once, on all GPUs")
    parser.add_argument("--here", action="store_true", help="stages in this process, in turn")
    parser.add_argument("--evaluate", action="store_true", help="the voice, too (training.assess)")
    parser.add_argument("--fresh", action="store_true", help="run also what is done")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 a stage failed, 2 an invalid recipe."""
    args = build_parser().parse_args(argv)
    try:
        minutes = [f"schedule.minutes={args.minutes}"] if args.minutes is not None else []
        start = [f"language_model.start={args.voice / WEIGHTS}"] if args.voice else []
        recipe = load_recipe(args.config, [*start, *args.set, *minutes])
        args.out.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, args.out / "recipe.toml")
        plan = Plan(args.out, recipe, evaluates=args.evaluate)
        named = {"corpus": args.corpus, "words": args.words, "reconstruct": args.codec}
        given = {name: source for name, source in named.items() if source is not None}
        given |= kept_parts(args.voice) if args.voice else {}
        prepare(plan, given, fresh=args.fresh)
        if args.together:
            from training.together import run_together

            run_together(plan)
        else:
            run_in_turn(plan, here=args.here)
    except RecipeError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 2
    except StageError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
