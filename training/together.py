"""The recipe within a fixed time: stages in parallel, on all GPUs.

    |-- synthesis on all cores, until 84 % of the time --------------|
    |-- codec stage 1, all GPUs --|-- stage 2, the first GPU --------------------|
                                  | tokenise | tokenise again | and again
                                             |-- aligner, the first GPU --|
                                  |-- language model, the other GPUs ------------|

Weights are saved continuously, and stages fail independently: the results at the end
are exported. If the output of the codec's first stage exists, the run continues from it; if its
second stage and the aligner exist, too, all GPUs train the language model. Without a codec the run
ends at once.
"""

from __future__ import annotations

import threading
import time

import torch

from training.codes import part_files
from training.run import Plan
from training.shards import FAILED, hours
from training.stages import Launcher, Running, Stage, StageError, give_up, is_done, sleep_until
from training.synthesize import STOP


def run_together(plan: Plan) -> None:
    """Run everything, then the export. Raises StageError for all failed stages, at the end."""
    if not is_done(plan.corpus()):
        Launcher(plan.out).start(plan.corpus()).wait()
    parallel_run = ParallelRun(plan)
    parallel_run.play(resumed=is_done(plan.reconstruct(0)))
    plan.stand_in()
    for stage in (plan.voice(), *((plan.evaluation(),) if plan.evaluates else ())):
        parallel_run.await_end(Launcher(plan.out).start(stage))
    if parallel_run.failures:
        raise StageError("; ".join(parallel_run.failures))


class ParallelRun:
    """Starts stages at their times; times are seconds since the start."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.schedule = plan, plan.recipe.schedule
        self.failures: list[str] = []
        self.total = self.schedule.minutes * 60
        self.start = time.time()
        self.launcher = Launcher(
            plan.out,
            {"RECIPE_START": str(self.start), "OMP_NUM_THREADS": "2",
             "TORCHINDUCTOR_COMPILE_THREADS": "8"},
        )  # fmt: skip
        gpus = list(range(torch.cuda.device_count()))
        few = max(1, min(self.schedule.adversarial_gpus, len(gpus) - 1))
        self.gpus, self.judged, self.others = gpus, gpus[:few], gpus[few:] or gpus
        self.first = "0" if gpus else ""

    def play(self, *, resumed: bool) -> None:
        (self.plan.speech / FAILED).unlink(missing_ok=True)
        synthesis = self.launcher.start(self.plan.synthesis())
        threading.Thread(target=self._watch, args=(synthesis,), daemon=True).start()
        if not is_done(words := self.plan.words()):
            job = (words, self.launcher.start(words))
            threading.Thread(target=self._watch_words, args=job, daemon=True).start()
        running = self._resume(synthesis) if resumed else self._from_nothing(synthesis)
        for stage in running:
            self.await_end(stage)

    def _watch(self, synthesis: Running) -> None:
        """Notify the stages that wait for speech when synthesis has ended."""
        if not self.await_end(synthesis):
            (self.plan.speech / FAILED).touch()

    def _watch_words(self, stage: Stage, running: Running) -> None:
        """Write the words, which the language model waits for after compilation."""
        if not self.await_end(running):
            give_up(stage)

    def await_end(self, stage: Running) -> bool:
        """Return whether the stage succeeded; a failure is recorded once."""
        try:
            stage.wait()
            return True
        except StageError as error:
            if str(error) not in self.failures:
                print(f"[{time.time() - self.start:7.1f}] {error}", flush=True)
                self.failures.append(str(error))
            return False

    def _from_nothing(self, synthesis: Running) -> list[Running]:
        plan, schedule = self.plan, self.schedule
        stage1_end = schedule.stage1_end * self.total
        reconstruct = self.launcher.start_group(plan.reconstruct(stage1_end), self.gpus)
        reconstruct.wait_until(self.start + stage1_end - schedule.compile_s)
        model = self._language_model()
        self.await_end(reconstruct)
        plan.stand_in()
        if not plan.first_codec.exists():
            failed = "; ".join(self.failures)
            synthesis.end()
            model.end()
            raise StageError(failed)
        self._await_speech()
        self._tokenise(1)
        adversarial = self._adversarial()
        self._tokenise_at(schedule.tokenise_again, 2, synthesis)
        return [model, adversarial, self._aligner()]

    def _resume(self, synthesis: Running) -> list[Running]:
        """Continue from the codec's first stage (its encoder is frozen)."""
        for part in part_files(self.plan.out / "codes"):
            part.unlink()  # of speech that will be synthesized again
        rest = [] if is_done(self.plan.adversarial(0)) else [self._adversarial()]
        if not rest:
            self.others = self.gpus
        model = self._language_model()
        self._await_speech()
        self._tokenise_at(self.schedule.resumed_tokenise, 1, synthesis)
        if not is_done(self.plan.aligner(0)):
            rest.append(self._aligner())
        return [model, *rest]

    def _await_speech(self) -> None:
        """Wait until there is enough speech for the language model, or the time for speech is
        over.
        """
        end, enough = self.schedule.speech_end, self.plan.recipe.language_model.min_hours
        while hours(self.plan.speech) < enough and time.time() < self.start + end * self.total:
            if (self.plan.speech / FAILED).exists():
                break
            time.sleep(0.5)

    def _adversarial(self) -> Running:
        return self.launcher.start_group(self.plan.adversarial(self.total), self.judged)

    def _language_model(self) -> Running:
        return self.launcher.start_group(self.plan.language_model(self.total), self.others)

    def _aligner(self) -> Running:
        until = time.time() - self.start + self.schedule.aligner_share * self.total
        return self.launcher.start(self.plan.aligner(until), self.first)

    def _tokenise(self, number: int) -> None:
        self.await_end(self.launcher.start(self.plan.codes(number), self.first))

    def _tokenise_at(self, shares: tuple[float, ...], number: int, synthesis: Running) -> None:
        for i, share in enumerate(shares):
            sleep_until(self.start + share * self.total)
            if share >= self.schedule.speech_end or i == len(shares) - 1:
                (self.plan.speech / STOP).touch()
                self.await_end(synthesis)
            self._tokenise(number + i)
