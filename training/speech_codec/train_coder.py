"""Train the codes: what reads them must find phones, pitch and energy again, and the style vector.

    python -m training.speech_codec.train_coder --plans runs/plans \
        --voices runs/teacher/voices.npz --out runs/coder --minutes 3

Plans are those of `training.kokoro.studio --silent`; no sound is needed, so a CPU does.
OUT/coder.safetensors holds both encoders (float16). It never changes afterwards: codec, language
model and aligner learn from its codes, each by itself. OUT/reader.safetensors holds what read them,
which only judging needs (`training.evaluate phonemes`). With --coder FILE the encoders are those of
the file, and a new reader (or that of --reader) learns to read their codes; with --new-symbols
PACKAGE they also learn the symbols that English does not use, and nothing else: codes of English
lines stay what they are, and so does all that learned from them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.kokoro.packages import symbols
from training.kokoro.phonemes import ACCENTS, SPANISH
from training.kokoro.studio import MIDDLING
from training.kokoro.style import StyleBook
from training.progress import Mean, Progress, Rate, add_run_arguments, run_to_the_end
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.coder import (
    CODER,
    Coder,
    Read,
    Reader,
    Sizes,
    load_coder,
    points_of,
    read_losses,
)
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.plans import CURVE_GRID, POINT, Plan, plan_at
from training.speech_lm.vocabulary import USED

SHORTEST, LONGEST = 40, 200  # ids of texts whose style rows are learned
MIDDLING_SHARE = 0.7  # of those at the length that is used
WARM_STEPS, LAST_RATE = 200, 0.02  # of the learning rate: it rises, its share at the end
MEAN_EVERY, MEAN_SHARE = 5, 0.02  # steps; of the newest weights in those that are kept
HELD_OUT = 32  # every so many lines one is not learned from
HELD_OUT_CROPS = 64


class Lines:
    """Plans of lines on the device."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        """Raises ValueError where there are none."""
        names = "phones", "pitch", "energy", "start", "accent"
        parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        samples = 0
        for path in paths:
            with np.load(path) as stored:
                session, first = stored["lines"].T
                parts["start"].append(first + samples)
                parts["accent"].append(stored["accent"][session])
                for name in ("phones", "pitch", "energy"):
                    parts[name].append(stored[name])
                samples += CURVE_GRID * len(stored["pitch"])
        if not samples:
            raise ValueError("there are no plans to learn from")
        whole = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
        self.takes = {name: value.to(device) for name, value in whole.items()}
        self.start, accent = self.takes.pop("start"), self.takes.pop("accent")
        ends = torch.cat((self.start[1:], torch.tensor([samples], device=device)))
        self.size = ends - self.start
        order = torch.arange(len(self.start), device=device)
        is_held_out, is_spanish = order % HELD_OUT == 0, accent == ACCENTS.index(SPANISH)
        self.training = order[~is_held_out]
        self.held_out = {
            "English": order[is_held_out & ~is_spanish],
            "Spanish": order[is_held_out & is_spanish],
        }

    @property
    def hours(self) -> float:
        return int(self.size.sum()) / 24_000 / 3600

    def draw(self, lines: Tensor, count: int, codes: int, sizes: Sizes) -> Plan:
        """`count` crops of so many codes, which may begin before a line or end behind it."""
        picked = lines[torch.multinomial(self.size[lines].float(), count, replacement=True)]
        low, size = self.start[picked], self.size[picked]
        span = codes * sizes.points_per_code * POINT
        room = (size - span // 4).clamp_min(1)
        first = low - span // 4 + (torch.rand(count, device=low.device) * room).long()
        points = points_of(first, codes, sizes)
        return plan_at(self.takes, points, low[:, None], (low + size)[:, None])


class Model(nn.Module):
    """The coder and what reads its codes."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.coder, self.reader = Coder(sizes), Reader(sizes)

    def forward(self, plan: Plan, style: Tensor) -> tuple[Read, Tensor]:
        """Losses of codes, and of the style vectors [B, 256] in their deviations."""
        values, _ = self.coder.codes(plan)
        read = read_losses(*self.reader.plan(values), plan)
        voice, _ = self.coder.voice(style)
        wanted = (style - self.coder.style.mean) / self.coder.style.size
        return read, (self.reader.style(voice.flatten(1)) - wanted).square().mean()


def learn_rows(table: nn.Parameter, rows: Sequence[int]) -> None:
    """Let these rows of a table learn, and no others."""
    mask = torch.zeros(len(table), 1)
    mask[list(rows)] = 1
    table.requires_grad_()
    table.register_hook(lambda gradient: gradient * mask.to(gradient.device))


def styles(book: StyleBook, count: int, rng: random.Random) -> Tensor:
    """Style vectors of drawn voices, mostly at the length that is used: [count, 256]."""
    lengths = [
        MIDDLING if rng.random() < MIDDLING_SHARE else rng.randint(SHORTEST, LONGEST)
        for _ in range(count)
    ]
    return torch.stack([book.style(book.draw(rng), length) for length in lengths])


class Trainer:
    """The coder and its reader, their data and their optimiser."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        sizes = coder_sizes(DESIGNS[args.design])
        self.sizes = sizes._replace(reader=args.reader_width or sizes.reader)
        self.lines = Lines(sorted(args.plans.glob("plan_*[0-9].npz")), self.device)
        book = StyleBook.load(args.voices, torch.device("cpu"))
        pool = styles(book, args.voices_drawn, random.Random(args.seed))
        self.pool = pool.to(self.device)
        self.model = self._model().to(self.device)
        rows = self.model.coder.content.phones.weight  # without decay, which changes all of them
        others = [p for p in self.model.parameters() if p is not rows]
        groups = [{"params": [rows], "weight_decay": 0.0}, {"params": others}]
        self.optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
        self.rate = Rate(args.lr, WARM_STEPS, LAST_RATE)
        self.mean = Mean(self.model, MEAN_EVERY, MEAN_SHARE)

    def _model(self) -> Model:
        """Return a new coder, or the one that stays as it is, and a reader."""
        model, args = Model(self.sizes), self.args
        if args.reader:
            stored = load_file(args.reader)
            model.reader.load_state_dict({name: value.float() for name, value in stored.items()})
        if args.coder:
            model.coder = load_coder(args.coder, self.sizes)
            if args.new_symbols:
                unused = {
                    n for symbol, n in symbols(args.new_symbols).items() if symbol not in USED
                }
                learn_rows(model.coder.content.phones.weight, sorted(unused))
        else:
            model.coder.style.mean.copy_(self.pool.mean(0).cpu())
            model.coder.style.size.copy_(self.pool.std(0).clamp_min(1e-3).cpu())
        return model

    def train_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Return the losses of the step after `step` others, at this share of the run."""
        args = self.args
        self.rate.set(step, share, self.optimiser)
        plan = self.lines.draw(self.lines.training, args.batch, args.crop, self.sizes)
        drawn = self.pool[torch.randint(len(self.pool), (args.styles,), device=self.device)]
        read, style = self.model(plan, drawn)
        loss = args.phone_weight * read.phone + args.pitch_weight * read.octaves + read.voiced
        loss = loss + args.energy_weight * read.energy + args.style_weight * style
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimiser.step()
        self.mean.update(step + 1)
        return {**read._asdict(), "style": style.detach()}

    @torch.no_grad()
    def held_out(self) -> str:
        """Return what the kept weights read from codes of lines that were not learned from."""
        model, found = self.mean.network, []
        for language, lines in self.lines.held_out.items():
            if not len(lines):
                continue
            plan = self.lines.draw(lines, HELD_OUT_CROPS, 64, self.sizes)
            read, style = model(plan, self.pool[:256])
            _, codes = model.coder.codes(plan)
            values = ", ".join(f"{k} {v.item():.4f}" for k, v in read._asdict().items())
            different = f"{len(codes.unique())} of {codes.numel()} codes differ"
            found.append(f"{language} {values}, style {style.item():.4f}, {different}")
        return f"held out: {'; '.join(found)}"

    def save(self) -> None:
        """Write the encoders, if they are new, and what reads their codes."""
        kept, out = self.mean.network, self.args.out
        if self.args.new_symbols or not self.args.coder:
            state = {f"{CODER}{k}": v for k, v in kept.coder.state_dict().items()}
            write(halved(state), out / "coder.safetensors")
        write(halved(kept.reader.state_dict()), out / "reader.safetensors")


def train(args: argparse.Namespace) -> None:
    """Train until the time is over."""
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    args.out.mkdir(parents=True, exist_ok=True)
    trainer, progress = Trainer(args), Progress(args.minutes, args.steps, args.log)
    lines = trainer.lines
    progress.clock.log(f"{lines.hours:.1f} h, {len(lines.training)} lines, on {trainer.device}")
    run_to_the_end(trainer, progress)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plans", "voices", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    add_run_arguments(parser)
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_free")
    parser.add_argument("--coder", type=Path, help="encoders that stay as they are")
    parser.add_argument(
        "--new-symbols", type=Path, help="package: symbols that English lacks learn"
    )
    parser.add_argument("--reader", type=Path, help="a reader to continue")
    parser.add_argument("--reader-width", type=int, default=0, help="0: as the design says")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=64, help="codes")
    parser.add_argument("--styles", type=int, default=128, help="style vectors of a step")
    parser.add_argument("--voices-drawn", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--phone-weight", type=float, default=3.0)
    parser.add_argument("--pitch-weight", type=float, default=8.0)
    parser.add_argument("--energy-weight", type=float, default=1.0)
    parser.add_argument("--style-weight", type=float, default=1.0)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.new_symbols and not args.coder:
        parser.error("--new-symbols needs --coder: new encoders learn all symbols of the plans")
    train(args)


if __name__ == "__main__":
    main()
