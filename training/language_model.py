"""Train the language model: text bytes and codes to codes, with a share of letters to phonemes.

    python -m training.language_model --corpus runs/corpus.txt --codes runs/codes --out runs \
        --until 1400

With `<|voice_any|>` in front of a document the voice must be inferred from its first turn, which
trains voice cloning. The loss is on codes, phones and ends only. New files runs/codes*.npz are
loaded during training.
"""

from __future__ import annotations

import argparse
import itertools
import math
import queue
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoder.codecs.embedded.modules import CodecConfig
from training.codes import part_files
from training.distributed import Clock, Deadline, Group
from training.documents import (
    BUCKETS,
    Batch,
    Part,
    Plan,
    Speech,
    assemble,
    bucketed,
    compose,
    single_turns,
)
from training.lexicon import HELD_OUT, LEXICON, MADE
from training.llama import LanguageModel, ModelConfig, checkpoint, quantise, restore
from training.pronunciations import Pairs, PhonemeTask, read_pairs
from training.recipe import parse
from training.stages import is_being_made
from training.strings import Strings
from training.vocabulary import FIRST_CODE


def phoneme_task(args: argparse.Namespace, lines: list[str]) -> PhonemeTask | None:
    """Return the task with the files of words that exist."""
    if not args.words:
        return None
    sentences, *shares = args.phoneme_parts
    files = (args.words.with_name(LEXICON), args.words, args.words.with_name(MADE))
    there = [(share, path) for share, path in zip(shares, files, strict=True) if path.exists()]
    parts, pairs = [share for share, _ in there], [read_pairs(path) for _, path in there]
    never = args.words.with_name(HELD_OUT)
    held_out = read_pairs(never) if never.exists() else Pairs(Strings([]), Strings([]))
    return PhonemeTask(args.phoneme_share, [sentences, *parts], pairs, lines, held_out)


AHEAD = 24  # batches: enough for the time to compose the next pass


class Loader:
    """Assembles this rank's share of every batch in advance, on a thread."""

    def __init__(
        self, args: argparse.Namespace, group: Group, lines: list[str], codes_per_hour: float
    ) -> None:
        self.args, self.group, self.lines = args, group, lines
        self.codes_per_hour = codes_per_hour
        self.phonemes = phoneme_task(args, lines)
        self.speech: Speech | None = None
        self.num_parts = self.loads = 0
        self.passes, self.fullness = 0.0, 1.0
        self._queue: queue.Queue[Ready | None] = queue.Queue(AHEAD)
        self._stop = threading.Event()

    @property
    def has_news(self) -> bool:
        """Whether there is speech that has not been loaded."""
        return len(part_files(self.args.codes)) > self.num_parts

    def load(self) -> Speech:
        """Load all parts that the first rank sees now; other ranks may see more."""
        parts = part_files(self.args.codes)
        parts = parts[: int(self.group.agree(len(parts)))]
        self.speech, self.num_parts = Speech(parts, self.lines), len(parts)
        hours = int(self.speech.code_len.sum()) / self.codes_per_hour
        self.fullness = min(1.0, hours / self.args.full_hours) if self.args.full_hours else 1.0
        return self.speech

    def start(self) -> None:
        """Iterate over the loaded speech, pass after pass, until stopped."""
        self._stop = threading.Event()
        self._queue = queue.Queue(AHEAD)
        self.loads += 1
        assert self.speech is not None
        job = (self.speech, self.loads, self._queue, self._stop)
        thread = threading.Thread(target=self._fill, args=job, daemon=True)
        thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _fill(self, speech: Speech, load: int, out: queue.Queue, stop: threading.Event) -> None:
        with ThreadPoolExecutor(1) as composer:  # composes the next pass while this one is used
            coming = composer.submit(self._compose, speech, (load, 0))
            for number in itertools.count(1):
                parts, plans = coming.result()
                coming = composer.submit(self._compose, speech, (load, number))
                for bucket, members in plans:
                    batch = self._batch(speech, bucket, [(parts[part], i) for part, i in members])
                    if not put(out, (batch, 1 / len(plans)), stop):
                        return
                if not plans:
                    out.put(None)
                    return

    def _compose(self, speech: Speech, seed: tuple[int, int]) -> tuple[list[Part], list[Plan]]:
        """Compose a pass: the same on every rank."""
        rng = np.random.default_rng((self.args.seed, *seed))
        parts = compose(speech, rng, self.phonemes, self.fullness)
        return parts, bucketed(parts, self.args.tokens * self.group.size, rng)

    def _batch(self, speech: Speech, length: int, members: Sequence[tuple[Part, int]]) -> Batch:
        """Return this rank's rows of a batch of all ranks."""
        rows, rank = max(1, self.args.tokens // length), self.group.rank
        mine = members[rank * rows : (rank + 1) * rows]
        batch = assemble([part.tokens(speech, i) for part, i in mine], length, rows)
        return batch.pinned() if self.group.is_cuda else batch

    def batches(self) -> Iterator[Batch]:
        while (ready := self._queue.get()) is not None:
            self.passes += ready[1]
            yield ready[0]


Ready = tuple[Batch, float]  # batch, and its share of a pass


def put(out: queue.Queue[Ready | None], ready: Ready, stop: threading.Event) -> bool:
    """Put an item as soon as there is room; return whether that was before the stop."""
    while not stop.is_set():
        try:
            out.put(ready, timeout=0.2)
            return True
        except queue.Full:
            continue
    return False


class Training:
    """The training loop and its state."""

    def __init__(self, args: argparse.Namespace, levels: tuple[int, ...]) -> None:
        self.args, self.clock, self.group = args, Clock(), Group()
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        self.config = ModelConfig(math.prod(levels), num_layers=args.layers, hidden_size=args.dim,
                                  num_heads=args.dim // 64, num_kv_heads=args.dim // 128,
                                  intermediate_size=3 * args.dim,
                                  dropout=args.dropout)  # fmt: skip
        self.model = LanguageModel(self.config, levels).to(self.group.device)
        if start := args.init or args.start:
            restore(self.model, load_file(start))
        self.group.broadcast(self.model.state_dict().values())
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.96),
                                           fused=self.group.is_cuda)  # fmt: skip
        self.noise = torch.Generator(self.group.device).manual_seed(args.seed + self.group.rank)
        count = sum(p.numel() for p in self.parameters)
        self.log(f"language model: {count / 1e6:.1f} M parameters, {asdict(self.config)}")
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.warm_up()

    def log(self, *parts: object) -> None:
        if self.group.is_first:
            self.clock.log(*parts)

    def warm_up(self) -> None:
        """Compile every bucket before the first batch."""
        for length in BUCKETS:
            rows = max(1, self.args.tokens // length)
            ids = torch.randint(0, self.config.vocab_size, (rows, length), device=self.group.device)
            chosen = torch.arange(0, rows * length, 2, device=self.group.device)
            self.forward(ids, chosen, ids.reshape(-1)[chosen]).backward()
            self.optimiser.zero_grad(set_to_none=True)
        self.log("compiled")

    def forward(self, ids: Tensor, chosen: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.group.is_cuda):
            return self.model.loss(ids, chosen, targets, self.args.phoneme_weight)

    def corrupt(self, ids: Tensor) -> Tensor:
        """Replace a few input codes at random, so that the model learns to recover from errors."""
        shape, device = ids.shape, ids.device
        hit = torch.rand(shape, device=device, generator=self.noise) < self.args.noise
        other = torch.randint(FIRST_CODE, self.config.vocab_size, shape, device=device,
                              generator=self.noise)  # fmt: skip
        return torch.where(hit & (ids >= FIRST_CODE), other, ids)

    def step(self, batch: Batch, lr: float) -> Tensor:
        device = self.group.device
        ids, chosen, targets = (t.to(device, non_blocking=True)
                                for t in (batch.ids, batch.chosen, batch.targets))  # fmt: skip
        for setting in self.optimiser.param_groups:
            setting["lr"] = lr
        loss = self.forward(self.corrupt(ids), chosen, targets)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.group.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        return loss.detach()

    def validate(self, speech: Speech, documents: Part) -> float:
        """Return the mean loss per target of held-out documents.

        Computed as in training, with dropout: another mode would be compiled again.
        """
        total = count = 0.0
        for bucket, members in bucketed([documents], self.args.tokens, np.random.default_rng(0)):
            rows = [documents.tokens(speech, i) for _, i in members]
            batch = assemble(rows, bucket, max(1, self.args.tokens // bucket))
            device = self.group.device
            loss = self.forward(batch.ids.to(device), batch.chosen.to(device),
                                batch.targets.to(device)).detach()  # fmt: skip
            total, count = total + float(loss) * len(batch.targets), count + len(batch.targets)
        return total / max(count, 1)

    def save(self) -> None:
        if self.group.is_first:
            save_file(quantise(checkpoint(self.model)), self.args.out / "lm.tmp")
            (self.args.out / "lm.tmp").rename(self.args.out / "lm.safetensors")


class Course:
    """Passes until the end of the time, with new speech as it arrives."""

    def __init__(self, training: Training, loader: Loader) -> None:
        self.training, self.loader, self.args = training, loader, training.args
        self.clock, self.group = training.clock, training.group
        self.step = self.seen = 0
        self.running: Tensor | float = 0.0
        self._load()
        self.deadline = Deadline(self.clock, self.group, self.args.until, self.args.steps)
        self.last = self.saved = self.clock.now()

    def _load(self) -> None:
        speech, share = self.loader.load(), self.loader.fullness
        self.training.log(f"{len(speech.train)} clips, {len(speech.turns)} tokens, x {share:.2f}")

    def run(self) -> None:
        while not self.deadline.has_passed:
            before = self.step
            self.loader.start()
            self._until_news()
            self.loader.stop()
            if self.step == before and not self.deadline.has_passed:
                raise SystemExit(f"no document is as short as {BUCKETS[-1]} tokens")
            if self._has_news():
                self._load()

    def _has_news(self) -> bool:
        return bool(self.group.agree(float(self.loader.has_news)))

    def _until_news(self) -> None:
        """Wait until the end of the time, or new speech."""
        for batch in self.loader.batches():
            if (share := self.deadline.share(self.step)) >= 1:
                return
            lr = self.args.lr * min(1.0, (self.step + 1) / 300) * max(0.0, 1 - 0.99 * share)
            self.running = self.running + self.training.step(batch, lr)
            self.step += 1
            self.seen += batch.ids.numel() * self.group.size
            if self.step % 200 == 0:
                self._report()
                if self._has_news():
                    return

    def held_out(self) -> str:
        """Format the losses of held-out data: single turns, and words that follow the rules."""
        speech, phonemes = self.loader.speech, self.loader.phonemes
        assert speech is not None
        value = self.training.validate(speech, single_turns(speech, speech.held_out))
        if phonemes is None or not len(phonemes.held_out.first):
            return f"{value:.3f}"
        return f"{value:.3f}, phones {self.training.validate(speech, phonemes.held_out):.4f}"

    def _report(self) -> None:
        held_out = self.held_out()
        pace = self.seen / (self.clock.now() - self.last)
        rate = self.training.optimiser.param_groups[0]["lr"]
        self.training.log(
            f"step {self.step} pass {self.loader.passes:.1f} loss {float(self.running) / 200:.3f} "
            f"held out {held_out} lr {rate:.2e} {pace / 1e6:.2f} M tokens/s"
        )
        self.running, self.seen, self.last = 0.0, 0, self.clock.now()
        if self.group.agree(self.clock.now() - self.saved) > self.args.save_every:
            self.training.save()
            self.saved = self.last = self.clock.now()


def train(args: argparse.Namespace, codec: CodecConfig) -> None:
    training = Training(args, codec.levels)
    group = training.group
    while group.agree(float(bool(args.words) and is_being_made(args.words))):
        time.sleep(0.5)
    codes_per_hour = 3600 * codec.sample_rate / codec.hop
    loader = Loader(args, group, args.corpus.read_text().splitlines(), codes_per_hour)
    while group.agree(float(not loader.has_news)):
        if group.agree(training.clock.now()) > args.until:
            raise SystemExit("no speech arrived in time")
        time.sleep(0.5)
    course = Course(training, loader)
    course.run()
    training.save()
    training.log(f"done: {course.step} steps, held out {course.held_out()}")
    group.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True, help="prefix of codes*.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since RECIPE_START")
    parser.add_argument("--init", type=Path, help="continue from these weights")
    parser.add_argument("--words", type=Path, help="words.tsv of training.lexicon")
    args, recipe = parse(parser, "language_model", argv)
    random.seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args, recipe.codec)


if __name__ == "__main__":
    main()
