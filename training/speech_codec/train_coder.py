"""Train the codes: what reads them must find phones, pitch and energy again, and the style vector.

    python -m training.speech_codec.train_coder --plans runs/plans \
        --voices runs/teacher/voices.npz --out runs/coder --minutes 3

Plans are those of `training.kokoro.studio --silent`; no sound is needed, so a CPU does.
OUT/coder.safetensors holds both encoders (float16). It never changes afterwards: codec, language
model and aligner learn from its codes, each by itself.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from training.kokoro.studio import MIDDLING
from training.kokoro.style import StyleBook
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.coder import Coder, Read, Reader, Sizes, points_of, read_losses
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.plans import CURVE_GRID, POINT, Plan, plan_at

SHORTEST, LONGEST = 40, 200  # ids of texts whose style rows are learned
MIDDLING_SHARE = 0.7  # of those at the length that is used
WARM_STEPS = 200
MEAN_EVERY, MEAN_SHARE = 5, 0.02  # steps; of the newest weights in those that are kept
HELD_OUT = 32  # every so many lines one is not learned from


class Lines:
    """Plans of lines on the device."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        """Raises ValueError where there are none."""
        parts: dict[str, list[np.ndarray]] = {"phones": [], "pitch": [], "energy": [], "start": []}
        samples = 0
        for path in paths:
            with np.load(path) as stored:
                parts["start"].append(stored["lines"][:, 1] + samples)
                for name in ("phones", "pitch", "energy"):
                    parts[name].append(stored[name])
                samples += CURVE_GRID * len(stored["pitch"])
        if not samples:
            raise ValueError("there are no plans to learn from")
        whole = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
        self.takes = {name: value.to(device) for name, value in whole.items()}
        self.start = self.takes.pop("start")
        ends = torch.cat((self.start[1:], torch.tensor([samples], device=device)))
        self.size = ends - self.start
        order = torch.arange(len(self.start), device=device)
        self.training, self.held_out = order[order % HELD_OUT > 0], order[order % HELD_OUT == 0]

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


def styles(book: StyleBook, count: int, rng: random.Random) -> Tensor:
    """Style vectors of drawn voices, mostly at the length that is used: [count, 256]."""
    lengths = [
        MIDDLING if rng.random() < MIDDLING_SHARE else rng.randint(SHORTEST, LONGEST)
        for _ in range(count)
    ]
    return torch.stack([book.style(book.draw(rng), length) for length in lengths])


def train(args: argparse.Namespace) -> None:
    """Until the time is over."""
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = coder_sizes(DESIGNS[args.design])
    lines = Lines(sorted(args.plans.glob("plan_*[0-9].npz")), device)
    book = StyleBook.load(args.voices, device)
    model = Model(sizes).to(device)
    pool = styles(book, args.voices_drawn, rng).to(device)
    model.coder.style.mean.copy_(pool.mean(0))
    model.coder.style.size.copy_(pool.std(0).clamp_min(1e-3))
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    mean = {k: v.detach().clone() for k, v in model.state_dict().items()}
    args.out.mkdir(parents=True, exist_ok=True)
    began = logged = time.monotonic()
    print(f"{lines.hours:.1f} h, {len(lines.training)} lines, on {device}", flush=True)
    step, share = 0, 0.0
    while share < 1:
        share = (time.monotonic() - began) / (60 * args.minutes)
        share = max(share, step / args.steps if args.steps else 0.0)
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / WARM_STEPS) * max(0.02, 1 - share)
        plan = lines.draw(lines.training, args.batch, args.crop, sizes)
        drawn = pool[torch.randint(len(pool), (args.styles,), device=device)]
        read, style = model(plan, drawn)
        loss = args.phone_weight * read.phone + args.pitch_weight * read.octaves + read.voiced
        loss = loss + args.energy_weight * read.energy + args.style_weight * style
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimiser.step()
        step += 1
        if step % MEAN_EVERY == 0:
            weight = max(MEAN_SHARE, min(0.5, 5 / step))
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    mean[name].lerp_(value, weight)
        if time.monotonic() - logged > args.log:
            values = " ".join(f"{k} {v.item():.3f}" for k, v in read._asdict().items())
            print(f"[{time.monotonic() - began:6.0f}] step {step} {values} "
                  f"style {style.item():.4f}", flush=True)  # fmt: skip
            logged = time.monotonic()
    state = {k: v for k, v in mean.items() if k.startswith("coder.")}
    write(halved(state), args.out / "coder.safetensors")
    model.load_state_dict(mean)
    print(held_out(model.eval(), lines, sizes, pool), f"after {step} steps", flush=True)


@torch.no_grad()
def held_out(model: Model, lines: Lines, sizes: Sizes, pool: Tensor) -> str:
    """What is read from codes of lines that were not learned from."""
    plan = lines.draw(lines.held_out, 64, 64, sizes)
    read, style = model(plan, pool[:256])
    _, codes = model.coder.codes(plan)
    values = ", ".join(f"{k} {v.item():.4f}" for k, v in read._asdict().items())
    used = len(codes.unique())
    return f"held out: {values}, style {style.item():.4f}, {used} of {codes.numel()} codes differ"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("plans", "voices", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_free")
    parser.add_argument("--steps", type=int, default=0, help="at most; 0: as time allows")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=64, help="codes")
    parser.add_argument("--styles", type=int, default=128, help="style vectors of a step")
    parser.add_argument("--voices-drawn", type=int, default=20_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--phone-weight", type=float, default=1.0)
    parser.add_argument("--pitch-weight", type=float, default=8.0)
    parser.add_argument("--energy-weight", type=float, default=1.0)
    parser.add_argument("--style-weight", type=float, default=1.0)
    parser.add_argument("--log", type=float, default=10.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
