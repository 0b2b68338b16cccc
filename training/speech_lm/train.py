"""Train the language model on tokenised sessions, on one device, for a while.

    python -m training.speech_lm.train --tokens runs/tokens --phonemes runs/phonemes \
        --package runs/teacher/package --voices runs/teacher/voices.npz \
        --config runs/codec/source_free.json --out runs/lm --minutes 15 [--after FILE]

With --after it gets ready at once and begins when that file is there; the minutes are of the whole.
The learning rate falls to a hundredth over the minutes, the --steps or the --passes, whichever ends
first. OUT/lm.safetensors holds the running mean of the weights (float16, names of Hugging Face's
Llama), OUT/lm.json the sizes, OUT/voices.json the named voices' rows of voice tokens (as codes).
Every `--save` seconds and at the end they are written if the loss of held-out lines is the lowest
so far; with --keep-saves all are kept, in OUT/save_00 and so on. It stops when the loss has not
fallen for --patience saves. --start continues such a file, or the model.safetensors of an exported
voice, and keeps the rows next to it. --ends and --rising let codes count more that say how the
pitch of a question ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.documents import Batch, assemble, bucketed
from training.kokoro.packages import symbols
from training.kokoro.style import StyleBook
from training.llama import LanguageModel, ModelConfig, checkpoint, restore
from training.progress import Clock, Deadline, Mean, Rate, add_run_arguments
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.config import load_config
from training.speech_lm.documents import (
    BUCKETS,
    SYMBOLS,
    TEXT,
    Part,
    compose,
    held_out,
    pronounced_held_out,
)
from training.speech_lm.names import rows_of
from training.speech_lm.speech import Speech, token_files
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import FIRST_CODE, Symbols

AHEAD = 24  # batches
MEAN_EVERY, MEAN_SHARE = 10, 0.01  # steps; of the newest weights in those that are kept
WARM_STEPS, LAST_RATE = 300, 0.01  # of the learning rate: it rises, its share at the end
HELD_OUT_TOKENS = 8_192  # of a batch that is not learned from
LOOK_EVERY_S = 0.2


class Loader:
    """Composes and assembles batches ahead, on a thread, pass after pass."""

    def __init__(self, speech: Speech, texts: Texts, tokens: int, seed: int) -> None:
        self.speech, self.texts, self.tokens, self.seed = speech, texts, tokens, seed
        self.passes = 0.0
        self._queue: queue.Queue[tuple[Batch, float] | Exception] = queue.Queue(AHEAD)
        threading.Thread(target=self._fill, daemon=True).start()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            ready = self._queue.get()
            if isinstance(ready, Exception):
                raise ready
            self.passes += ready[1]
            yield ready[0]

    def _fill(self) -> None:
        try:
            for number in itertools.count():
                self._pass((self.seed, number))
        except Exception as error:  # told to the loop, which waits for a batch
            self._queue.put(error)

    def _pass(self, seed: tuple[int, int]) -> None:
        parts = compose(self.speech, self.texts, seed)
        plans = bucketed(parts, self.tokens, np.random.default_rng(seed), BUCKETS)
        for bucket, members in plans:
            rows = [parts[part].weighted(i) for part, i in members]
            batch = assemble(rows, bucket, max(1, self.tokens // bucket))
            pinned = batch.pinned() if torch.cuda.is_available() else batch
            self._queue.put((pinned, 1 / len(plans)))


class Trainer:
    """The model, its optimiser and its clock."""

    def __init__(self, args: argparse.Namespace, levels: tuple[int, ...]) -> None:
        self.args, self.clock = args, Clock()
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.is_cuda, self.levels = torch.cuda.is_available(), levels
        self.device = torch.device("cuda" if self.is_cuda else "cpu")
        self.config = ModelConfig.sized(
            int(np.prod(levels)), args.layers, args.dim, BUCKETS[-1], args.dropout
        )
        self.model = LanguageModel(self.config, levels).to(self.device)
        if args.start:
            restore(self.model, load_file(args.start))
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(
            groups, lr=args.lr, betas=(0.9, 0.96), fused=self.is_cuda
        )
        self.mean = Mean(self.model, MEAN_EVERY, MEAN_SHARE)
        self.rate, self.step = Rate(args.lr, WARM_STEPS, LAST_RATE), 0
        count = sum(p.numel() for p in self.parameters)
        self.clock.log(f"{count / 1e6:.1f} M parameters on {self.device}")
        if args.compile:
            self._compile()

    def _compile(self) -> None:
        """Every bucket, before there is anything to learn."""
        torch._dynamo.config.recompile_limit = 128  # buckets x layers at most
        for layer in self.model.layers:
            layer.compile(dynamic=False)
        for length in BUCKETS:
            rows = max(1, self.args.tokens_per_step // length)
            ids = torch.randint(0, self.config.vocab_size, (rows, length))
            chosen = torch.arange(0, rows * length, 2)
            targets, ones = ids.reshape(-1)[chosen], torch.ones(len(chosen))
            self.loss(self.model, Batch(ids, chosen, targets, ones)).backward()
            self.optimiser.zero_grad(set_to_none=True)
        self.clock.log("compiled")

    def loss(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Mean loss per target; in training a few codes that the model reads are others."""
        ids, chosen, targets, weights = (
            part.to(self.device, non_blocking=True)
            for part in (batch.ids, batch.chosen, batch.targets, batch.weights)
        )
        if model.training:
            ids = self._corrupted(ids)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_cuda):
            return model.loss(ids, chosen, targets, self.args.phoneme_weight, weights)

    def _corrupted(self, ids: Tensor) -> Tensor:
        """So that the model recovers from its own slips."""
        hit = torch.rand(ids.shape, device=ids.device) < self.args.noise
        other = torch.randint_like(ids, FIRST_CODE, self.config.vocab_size)
        return torch.where(hit & (ids >= FIRST_CODE), other, ids)

    def train_step(self, batch: Batch, share: float) -> Tensor:
        """One step at this share of the time; the loss."""
        self.rate.set(self.step, share, self.optimiser)
        loss = self.loss(self.model, batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.step += 1
        self.mean.update(self.step)
        return loss.detach()

    @torch.no_grad()
    def held_out(self, documents: Part) -> np.ndarray:
        """The sum of the kept weights' losses, and what the targets count: [2]."""
        found = np.zeros(2)
        rng = np.random.default_rng(0)
        for bucket, members in bucketed([documents], HELD_OUT_TOKENS, rng, BUCKETS):
            rows = [documents.weighted(i) for _, i in members]
            batch = assemble(rows, bucket, max(1, HELD_OUT_TOKENS // bucket))
            count = float(batch.weights.sum())
            if count:
                found += float(self.loss(self.mean.network, batch)) * count, count
        return found

    def save(self, out: Path, fixed: dict[str, list[int]], voice_tokens: int) -> None:
        """Write everything that is kept, each file whole."""
        out.mkdir(exist_ok=True)
        write(halved(checkpoint(self.mean.network)), out / "lm.safetensors")
        sizes = {"voice_tokens": voice_tokens, "levels": list(self.levels)}
        for name, value in (("lm", asdict(self.config) | sizes), ("voices", fixed)):
            partial_ = out / f"{name}.tmp"
            partial_.write_text(json.dumps(value) + "\n", encoding="utf-8")
            partial_.rename(out / f"{name}.json")


class Course:
    """Data, the loop, and what is said of it."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, texts: Texts) -> None:
        self.args, self.trainer, self.clock = args, trainer, trainer.clock
        book = StyleBook.load(args.voices, torch.device("cpu"))
        self.names = book.named
        self.speech = speech = Speech(token_files(args.tokens), texts, self._fixed())
        speech.weigh_ends(args.ends, args.rising)
        made_up, spanish = texts.unwritten, texts.spanish
        asks = texts.asks & ~made_up & ~spanish
        self.judging: dict[str, Part] = {
            "lines": held_out(speech, texts, TEXT, ~(made_up | asks | spanish)),
            "questions": held_out(speech, texts, TEXT, asks),
            "made-up words": held_out(speech, texts, TEXT, made_up),
            "Spanish": held_out(speech, texts, TEXT, spanish),
        }
        self.others: dict[str, Part] = {
            "ends of questions": held_out(speech, texts, TEXT, asks, only_ends=True),
            "symbols": held_out(speech, texts, SYMBOLS),
            "letters": pronounced_held_out(texts),
        }
        self.best, self.since, self.saves = math.inf, 0, 0
        hours = speech.code_len.sum() / 25 / 3600
        self.clock.log(
            f"{hours:.1f} h, {len(speech.train)} lines and {len(speech.held_out)} held out, "
            f"{len(np.unique(speech.text))} texts, {len(speech.voice)} tracks, "
            f"{len(speech.fixed)} named voices, {speech.asks.mean():.2f} questions"
        )
        self.loader = Loader(speech, texts, args.tokens_per_step, args.seed)

    def _fixed(self) -> dict[int, np.ndarray]:
        """Rows of the run that this one continues."""
        path = self.args.start.with_name("voices.json") if self.args.start else None
        if path is None or not path.exists():
            return {}
        return {
            self.names.index(name): (np.array(row) + FIRST_CODE).astype(np.int16)
            for name, row in rows_of(path).items()
        }

    def rows(self) -> dict[str, list[int]]:
        """The named voices' rows, as codes."""
        fixed = sorted(self.speech.fixed.items())
        return {self.names[voice]: (row.astype(int) - FIRST_CODE).tolist() for voice, row in fixed}

    def _losses(self, parts: Mapping[str, Part]) -> tuple[float, str]:
        """The mean loss of what is not trained on, and a word about each part; NaN of nothing."""
        found = {name: self.trainer.held_out(part) for name, part in parts.items()}
        total, count = sum(found.values())
        each = (f"{name} {a / max(b, 1):.3f}" for name, (a, b) in found.items() if b)
        return total / count if count else math.nan, ", ".join(each)

    def judge(self) -> float:
        """Log losses of what is not trained on, and return the one that decides."""
        loss, each = self._losses(self.judging)
        _, others = self._losses(self.others)
        self.clock.log(f"held out: {loss:.4f} ({each}); {others}")
        return loss

    def save(self) -> None:
        """Write the weights if they are the best so far, or if all are kept.

        Raises SystemExit when they have become useless; those of earlier saves stay.
        """
        loss, fixed, out = self.judge(), self.rows(), self.args.out
        if len(self.speech.held_out) and not math.isfinite(loss):
            raise SystemExit(f"the held-out loss is not finite at step {self.trainer.step}")
        if self.args.keep_saves:
            folder = out / f"save_{self.saves:02d}"
            self.trainer.save(folder, fixed, self.speech.voice_tokens)
        self.saves += 1
        self.since += 1
        if loss < self.best or math.isnan(loss):  # NaN: nothing is held out
            self.best, self.since = loss, 0
            self.trainer.save(out, fixed, self.speech.voice_tokens)
            self.clock.log(f"kept, {self.loader.passes:.1f} passes")

    def run(self) -> None:
        """Until the time is over, or the loss does not fall any more."""
        trainer, args = self.trainer, self.args
        if args.start:
            self.judge()
        deadline = Deadline(self.clock, 60 * args.minutes, args.steps)
        logged = saved = self.clock.now()
        stepped = -1  # steps at the newest save
        seen, running, last = 0, torch.zeros((), device=trainer.device), 0
        for batch in self.loader:
            share = deadline.share(trainer.step)
            if args.passes:
                share = max(share, self.loader.passes / args.passes)
            if share >= 1 or (args.patience and self.since >= args.patience):
                break
            running += trainer.train_step(batch, share)
            seen += batch.ids.numel()
            now = self.clock.now()
            if now - logged > args.log:
                mean, pace = running.item() / (trainer.step - last), seen / (now - logged)
                self.clock.log(f"step {trainer.step} pass {self.loader.passes:.1f} loss {mean:.3f} "
                               f"{pace / 1e6:.3f} M tokens/s")  # fmt: skip
                if not np.isfinite(mean):
                    raise SystemExit(f"the loss is not finite at step {trainer.step}")
                running.zero_()
                logged, seen, last = self.clock.now(), 0, trainer.step
            if now - saved > args.save:
                self.save()
                saved = logged = self.clock.now()
                stepped = trainer.step
                running.zero_()
                seen, last = 0, trainer.step
        if trainer.step > stepped:
            self.save()
        self.clock.log(f"done after {trainer.step} steps, {self.loader.passes:.1f} passes")


def train(args: argparse.Namespace) -> None:
    """Get ready, wait for the tokens, learn."""
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, load_config(args.config).levels)
    texts = Texts.load(args.phonemes, Symbols(symbols(args.package)))
    while args.after is not None and not args.after.exists():
        if trainer.clock.now() > 60 * args.minutes:
            raise SystemExit(f"{args.after} did not come in time")
        time.sleep(LOOK_EVERY_S)
    Course(args, trainer, texts).run()
    if trainer.is_cuda:
        trainer.clock.log(f"peak {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tokens", "phonemes", "package", "voices", "config", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    add_run_arguments(parser)
    parser.add_argument("--after", type=Path, help="begin when this file is there")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to continue")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512, help="heads of 64, two to a key-value head")
    parser.add_argument("--tokens-per-step", type=int, default=131_072)
    parser.add_argument("--lr", type=float, default=1.6e-3)
    parser.add_argument("--noise", type=float, default=0.04, help="share of codes that are read")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--phoneme-weight", type=float, default=1.0, help="of letters to sounds")
    parser.add_argument("--ends", type=float, default=1.0, help="weight of a question's last pitch")
    parser.add_argument("--rising", type=float, default=1.0, help="and again of one that rises")
    parser.add_argument("--passes", type=float, default=0.0, help="at most, 0: as time allows")
    parser.add_argument("--patience", type=int, default=0, help="saves, 0: never stop early")
    parser.add_argument("--keep-saves", action="store_true", help="all of them")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=float, default=120.0, help="seconds")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
