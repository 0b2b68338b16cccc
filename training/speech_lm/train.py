"""Train the language model on tokenised sessions, on one device, for a while.

    python -m training.speech_lm.train --tokens runs/tokens --phonemes runs/phonemes \
        --package runs/teacher/package --voices runs/teacher/voices.npz \
        --config runs/codec/source_free.json --out runs/lm --minutes 15 [--after FILE]

With --after it gets ready at once and begins when that file is there; the minutes are of the whole.
OUT/lm.safetensors holds the running mean of the weights (float16, names of Hugging Face's Llama),
OUT/lm.json the sizes, OUT/voices.json the named voices' rows of voice tokens (as codes); they are
written every `--save` seconds. --start continues such a file, or the model.safetensors of an
exported voice, and keeps the rows next to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
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
    wanted,
)
from training.speech_lm.names import rows_of
from training.speech_lm.speech import Speech, token_files
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import FIRST_CODE, Symbols

AHEAD = 24  # batches
MEAN_EVERY, MEAN_SHARE = 10, 0.01  # steps; of the newest weights in those that are kept
WARM_STEPS, LAST_RATE = 300, 0.01  # of the learning rate: it rises, its share at the end
HELD_OUT_TOKENS = 16_384  # of a batch that is not learned from
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
            rows = [parts[part].tokens(i) for part, i in members]
            batch = batch_of(rows, bucket, self.tokens, self.speech.voice_tokens)
            pinned = batch.pinned() if torch.cuda.is_available() else batch
            self._queue.put((pinned, 1 / len(plans)))


def batch_of(rows: list[np.ndarray], bucket: int, tokens: int, voice_tokens: int) -> Batch:
    """Documents of one bucket, padded."""
    size = max(1, tokens // bucket)
    return assemble(rows, bucket, size, partial(wanted, voice_tokens=voice_tokens))


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
            self.loss(self.model, Batch(ids, chosen, ids.reshape(-1)[chosen])).backward()
            self.optimiser.zero_grad(set_to_none=True)
        self.clock.log("compiled")

    def loss(self, model: LanguageModel, batch: Batch) -> Tensor:
        """Mean loss per target; in training a few codes that the model reads are others."""
        ids, chosen, targets = (
            part.to(self.device, non_blocking=True)
            for part in (batch.ids, batch.chosen, batch.targets)
        )
        if model.training:
            ids = self._corrupted(ids)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_cuda):
            return model.loss(ids, chosen, targets, self.args.phoneme_weight)

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
    def held_out(self, documents: Part, voice_tokens: int) -> float:
        """Mean loss per target of the kept weights."""
        total = count = 0.0
        rng = np.random.default_rng(0)
        for bucket, members in bucketed([documents], HELD_OUT_TOKENS, rng, BUCKETS):
            rows = [documents.tokens(i) for _, i in members]
            batch = batch_of(rows, bucket, HELD_OUT_TOKENS, voice_tokens)
            loss = float(self.loss(self.mean.network, batch))
            total, count = total + loss * len(batch.targets), count + len(batch.targets)
        return total / max(count, 1)

    def save(self, fixed: dict[str, list[int]], voice_tokens: int) -> None:
        """Everything that is kept, whole."""
        out = self.args.out
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
        self.names = book.english
        self.speech = speech = Speech(token_files(args.tokens), texts, self._fixed())
        self.tasks: dict[str, Part] = {
            "text": held_out(speech, texts, TEXT), "symbols": held_out(speech, texts, SYMBOLS),
            "letters": pronounced_held_out(texts),
        }  # fmt: skip
        hours = speech.code_len.sum() / 25 / 3600
        self.clock.log(
            f"{hours:.1f} h, {len(speech.train)} lines and {len(speech.held_out)} held out, "
            f"{len(np.unique(speech.text))} texts, {len(speech.voice)} tracks, "
            f"{len(speech.fixed)} named voices"
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

    def save(self) -> None:
        self.trainer.save(self.rows(), self.speech.voice_tokens)

    def losses(self) -> str:
        """Of what is not trained on."""
        said = {name: self.trainer.held_out(part, self.speech.voice_tokens)
                for name, part in self.tasks.items()}  # fmt: skip
        return "held out: " + ", ".join(f"{name} {value:.3f}" for name, value in said.items())

    def run(self) -> None:
        """Until the time is over."""
        trainer, args = self.trainer, self.args
        if args.start:
            self.clock.log(f"before: {self.losses()}")
        deadline = Deadline(self.clock, 60 * args.minutes, args.steps)
        logged = saved = self.clock.now()
        seen, running, last = 0, torch.zeros((), device=trainer.device), 0
        for batch in self.loader:
            share = deadline.share(trainer.step)
            if share >= 1:
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
                self.clock.log(self.losses())
                saved = logged = self.clock.now()
                running.zero_()
                seen, last = 0, trainer.step
        self.save()
        self.clock.log(self.losses())
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
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=float, default=120.0, help="seconds")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
