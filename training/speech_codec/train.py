"""Train one design of the codec on one device, from the teacher's takes, for a while.

    python -m training.speech_codec.train --design source_free --takes runs/speech \
        --out runs/codec --minutes 15

First by mel distance and by what must be heard in codes and voice tokens, soon against
discriminators as well; all parts learn to the end. OUT/NAME.safetensors holds the running mean of
the weights (float16), OUT/NAME.8bit.safetensors the same in 8 bits, OUT/NAME.judges.safetensors
the discriminators; they are written every `--save` seconds. Optimisers' state is not kept.

With --frozen-encoders only the decoder learns: codes and voice tokens stay those of --start, so
that a language model of them can learn at the same time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoder.codecs.source_filter.excitation import Drive
from decoder.codecs.source_filter.modules import SpeechCodec
from training.losses import Discriminators, MelLoss, discriminator_loss, generator_losses
from training.speech_codec.checkpoint import CODEC, eighth_bits, halved, read, write
from training.speech_codec.config import DESIGNS, save_config
from training.speech_codec.crops import Crops, Examples, Sizes, load_takes
from training.speech_codec.listener import Heard, Listener
from training.speech_codec.pitch import pitch_loss, true_drive

RESOLUTIONS = (512, 1024, 2048)  # of the spectral discriminators
MEAN_EVERY, MEAN_SHARE = 10, 0.01  # steps; of the newest weights in those that are kept
WARM_STEPS = 300  # the learning rate rises


class Said(NamedTuple):
    """What a model makes of a batch."""

    samples: Tensor  # float32 [B, S]
    heard: Heard | None  # None where the encoders are not to learn
    codes: Tensor  # int64 [B, T]
    source: Tensor  # loss of the decoder's pitch


class Model(nn.Module):
    """What learns to fool the judges: the codec and who listens to its codes.

    With `frozen` the decoder alone learns, and what it hears is encoded as in use.
    """

    def __init__(self, codec: SpeechCodec, listener: Listener, *, frozen: bool = False) -> None:
        super().__init__()
        self.codec, self.listener, self.frozen = codec, listener, frozen
        if frozen:
            self.requires_grad_(requires_grad=False)
            codec.decoder.requires_grad_()
        self.train()

    def train(self, mode: bool = True) -> Model:
        """Frozen encoders keep their running statistics."""
        super().train(mode)
        if self.frozen:
            self.codec.encoder.eval()
            self.codec.voice_encoder.eval()
        return self

    def forward(self, examples: Examples) -> Said:
        """In training every other row is driven by the true pitch, the others by the decoder's."""
        with torch.set_grad_enabled(self.training and not self.frozen):
            values, codes = self.codec.encode(examples.source)
            voice, _ = self.codec.voice(examples.reference)
        heard: Heard | None = None
        if not (self.frozen and self.training):
            heard = self.listener(values, voice, examples)
        decoder = self.codec.decoder
        x = decoder.features(values, voice)
        curve = decoder.curve(x)
        turns = torch.rand(len(x), device=x.device, dtype=torch.float64)
        drive = decoder.drive(curve, turns)
        if self.training:
            true = true_drive(examples.drive, examples.turns)
            even = torch.arange(len(x), device=x.device)[:, None] % 2 == 0
            pairs = zip(true, drive, strict=True)
            drive = Drive(*(torch.where(even, told, own) for told, own in pairs))
        source = pitch_loss(curve, examples.drive[:, decoder.reach :])
        noise = None if self.training else decoder.noise_under(drive)
        return Said(decoder.synthesise(x, drive, noise), heard, codes, source)


class Trainer:
    """One design, its judges, its data and its clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = DESIGNS[args.design]
        takes = load_takes(sorted(args.takes.glob("take_*[0-9].npz")), self.device)
        sizes = Sizes(args.batch, args.crop, args.reference)
        self.crops = Crops(takes, self.config, sizes)
        self.model = self._model().to(self.device)
        self.judges = Discriminators(args.judge_width, RESOLUTIONS).to(self.device)
        if self.device.type == "cuda":  # the layout of a GPU's matrix units
            self.judges.to(memory_format=torch.channels_last)
        self.mel = MelLoss(self.config.sample_rate).to(self.device)
        settings = {"betas": (0.8, 0.99), "weight_decay": 0.01}
        settings["fused"] = self.device.type == "cuda"
        learning = [part for part in self.model.parameters() if part.requires_grad]
        self.player = torch.optim.AdamW(learning, lr=args.lr, **settings)
        self.critic = torch.optim.AdamW(self.judges.parameters(), lr=args.lr, **settings)
        self.step, self.began, self.judging = 0, time.monotonic(), False
        if args.start:
            self._resume(args.start)
        self.mean = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def _model(self) -> Model:
        listener = Listener(self.config, *self.crops.style_size())
        return Model(SpeechCodec(self.config), listener, frozen=self.args.frozen_encoders)

    def _resume(self, start: Path) -> None:
        """Load a file of an earlier run, and the judges next to it. Of another design those tensors
        are taken that fit; the file's name is the design's."""
        found, name = read(start), start.name.split(".")[0]
        if name == self.args.design:
            self.model.load_state_dict(found)
        else:
            own = self.model.state_dict()
            fits = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
            self.model.load_state_dict(fits, strict=False)
            new, unused = sorted(own.keys() - fits), sorted(found.keys() - fits)
            self.log(f"{len(fits)} tensors from {start}; new: {new}; left out: {unused}")
        judges = start.with_name(f"{name}.judges.safetensors")
        if judges.exists():
            self.judges.load_state_dict(read(judges))

    @property
    def share(self) -> float:
        """Share of the run that is over: of the time or of the steps, whichever is larger."""
        passed = (time.monotonic() - self.began) / (60 * self.args.minutes)
        return min(1.0, max(passed, self.step / self.args.steps if self.args.steps else 0.0))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def window(self, samples: Tensor) -> Tensor:
        """Without the crop's edges, where codes have no neighbours."""
        config = self.config
        return samples[:, config.behind * config.hop : (self.args.crop - config.ahead) * config.hop]

    def train_step(self) -> dict[str, Tensor]:
        """One step of all; the losses."""
        args, share = self.args, self.share
        self.judging = self.judging or share >= args.alone
        self._set_rates(share)
        examples = self.crops.draw(self.crops.training)
        with self.autocast():
            got, heard, codes, source = self.model(examples)
        got, wanted = self.window(got), self.window(examples.target)
        mel, timbre = self.mel(got, wanted)
        loss = args.mel_weight * (mel + args.timbre_weight * timbre)
        loss = loss + args.source_weight * source
        seen = {"mel": mel, "timbre": timbre, "source": source}
        if heard is not None:
            loss = loss + args.phone_weight * heard.phone + args.pitch_weight * heard.pitch
            loss = loss + args.style_weight * heard.style
            seen |= heard._asdict()
        if self.judging:
            judged = self._judge(wanted, got)
            loss = loss + args.fool_weight * judged["fooled"] + args.match_weight * judged["match"]
            seen |= judged
        self.player.zero_grad(set_to_none=True)
        loss.backward()
        seen["norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.player.step()
        self.step += 1
        if self.step % MEAN_EVERY == 0:
            self._update_mean()
        return {name: value.detach() for name, value in (seen | {"codes": codes}).items()}

    def _judge(self, real: Tensor, fake: Tensor) -> dict[str, Tensor]:
        """A second of each: the critic's step, then how the decoder fared."""
        size = min(self.args.judged * self.config.hop, real.shape[1])
        first = random.randrange(real.shape[1] - size + 1)
        real, fake = real[:, first : first + size], fake[:, first : first + size]
        with self.autocast():
            both = self.judges(torch.cat((real, fake.detach())))
            scores, fakes = halves(both)
            critic = discriminator_loss(scores, fakes)
        self.critic.zero_grad(set_to_none=True)
        critic.backward()
        nn.utils.clip_grad_norm_(self.judges.parameters(), 5.0)
        self.critic.step()
        self.judges.requires_grad_(requires_grad=False)
        with self.autocast():
            # what real speech gave the critic a moment ago saves hearing it again
            told = [(score.detach(), [part.detach() for part in parts]) for score, parts in scores]
            fooled, match = generator_losses(told, self.judges(fake))
        self.judges.requires_grad_(requires_grad=True)
        return {"critic": critic, "fooled": fooled, "match": match}

    def _set_rates(self, share: float) -> None:
        rate = self.args.lr * min(1.0, (self.step + 1) / WARM_STEPS) * (1 - 0.95 * share)
        for settings in (*self.player.param_groups, *self.critic.param_groups):
            settings["lr"] = rate

    @torch.no_grad()
    def _update_mean(self) -> None:
        early = min(0.5, 10 / (self.step + 1))  # the first weights are soon forgotten
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                self.mean[name].lerp_(value, max(MEAN_SHARE, early))

    @torch.no_grad()
    def held_out(self) -> str:
        """The kept weights on sessions that are not learned from, same voice and crossed."""
        sessions = self.crops.held_out if len(self.crops.held_out) else self.crops.training
        model = self._model().to(self.device).eval()
        model.load_state_dict(self.mean)
        generator = torch.Generator(self.device).manual_seed(0)
        examples = self.crops.draw(sessions, generator)
        with self.autocast():
            got, heard, _, source = model(examples)
        parts = []
        for name, rows in (("same", ~examples.crosses), ("crossed", examples.crosses)):
            if rows.any():
                mel, _ = self.mel(self.window(got)[rows], self.window(examples.target)[rows])
                parts.append(f"{name} mel {mel.item():.3f}")
        assert heard is not None  # not in training
        return (f"held out: {', '.join(parts)}, phones right {heard.right.item():.3f}, "
                f"pitch {heard.pitch.item():.3f}, style {heard.style.item():.3f}, "
                f"source {source.item():.3f}")  # fmt: skip

    def save(self) -> None:
        """Everything that is kept, whole."""
        args = self.args
        state = halved(self.mean)
        write(state, args.out / f"{args.design}.safetensors")
        small = {name: value for name, value in state.items() if name.startswith(CODEC)}
        write(eighth_bits(small), args.out / f"{args.design}.8bit.safetensors")
        write(halved(self.judges.state_dict()), args.out / f"{args.design}.judges.safetensors")
        save_config(self.config, args.out / f"{args.design}.json")

    def log(self, *parts: object) -> None:
        print(f"[{time.monotonic() - self.began:6.0f}] {self.args.design}", *parts, flush=True)


def halves(both: list[tuple[Tensor, list[Tensor]]]) -> tuple[list, list]:
    """What judges said of the first half of a batch, and of the second."""
    first, second = [], []
    for score, features in both:
        middle = len(score) // 2
        first.append((score[:middle], [part[:middle] for part in features]))
        second.append((score[middle:], [part[middle:] for part in features]))
    return first, second


def describe(step: int, seen: dict[str, Tensor], pace_ms: float) -> str:
    """One line of a log."""
    codes = seen.pop("codes")
    values = " ".join(f"{name} {value.item():.3f}" for name, value in seen.items())
    return f"step {step} {values} codes {len(codes.unique())} of {codes.numel()} {pace_ms:.0f} ms"


def train(args: argparse.Namespace) -> None:
    """Until the time is over."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.log(f"{trainer.crops.hours:.1f} h in {len(trainer.crops.training)} sessions "
                f"and {len(trainer.crops.held_out)} held out, on {trainer.device}")  # fmt: skip
    logged = saved = time.monotonic()
    last = 0
    while trainer.share < 1:
        seen = trainer.train_step()
        now = time.monotonic()
        if now - logged > args.log or trainer.step in (1, 20):
            pace = 1e3 * (now - logged) / (trainer.step - last)
            trainer.log(describe(trainer.step, seen, pace))
            logged, last = time.monotonic(), trainer.step
            if not torch.isfinite(seen["mel"]):
                raise SystemExit(f"{args.design}: the loss is not finite at step {trainer.step}")
        if now - saved > args.save:
            trainer.save()
            trainer.log(trainer.held_out())
            saved = logged = time.monotonic()
            last = trainer.step
    trainer.save()
    trainer.log(trainer.held_out())
    if trainer.device.type == "cuda":
        trainer.log(f"peak {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
    trainer.log(f"done after {trainer.step} steps")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--design", choices=sorted(DESIGNS), required=True)
    parser.add_argument("--takes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--start", type=Path, help="weights of an earlier run to continue")
    parser.add_argument("--frozen-encoders", action="store_true", help="only the decoder learns")
    parser.add_argument("--steps", type=int, default=0, help="at most; 0: as time allows")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--crop", type=int, default=40, help="codes")
    parser.add_argument("--reference", type=int, default=100, help="codes")
    parser.add_argument("--judged", type=int, default=25, help="codes that the judges see")
    parser.add_argument("--judge-width", type=int, default=32)
    parser.add_argument("--alone", type=float, default=0.1, help="share of time without judges")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--clip", type=float, default=10.0)
    parser.add_argument("--mel-weight", type=float, default=6.0)
    parser.add_argument("--timbre-weight", type=float, default=20.0)
    parser.add_argument("--phone-weight", type=float, default=4.0)
    parser.add_argument("--pitch-weight", type=float, default=4.0)
    parser.add_argument("--style-weight", type=float, default=1.0)
    parser.add_argument("--source-weight", type=float, default=4.0, help="of the decoder's pitch")
    parser.add_argument("--fool-weight", type=float, default=0.5)
    parser.add_argument("--match-weight", type=float, default=1.0)
    parser.add_argument("--log", type=float, default=10.0, help="seconds")
    parser.add_argument("--save", type=float, default=120.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.frozen_encoders and not args.start:
        parser.error("--frozen-encoders: encoders that never learned are of no use, name --start")
    train(args)


if __name__ == "__main__":
    main()
