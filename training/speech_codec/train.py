"""Train one design of the decoder on one device, from the teacher's takes, for a while.

    python -m training.speech_codec.train --design source_ahead --takes runs/takes \
        --coder runs/coder/coder.safetensors --out runs/codec --minutes 15

The decoder learns by mel distance, soon against discriminators as well. A recogniser of phones,
which learns on the teacher's speech, has to understand the decoder's: a mel distance counts a
formant little. A decoder may be continued (`--start`) by one that sees more codes ahead: it begins
without what they say. Codes and voice tokens are the coder's, which does not change, so everything
else that learns from codes can learn at the same time.

OUT/NAME.safetensors holds the running mean of the weights (float16), OUT/NAME.8bit.safetensors the
same in 8 bits, OUT/NAME.judges.safetensors the discriminators; they are written every `--save`
seconds. Optimisers' state is not kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.excitation import Drive
from decoder.codecs.source_filter.modules import Decoder, LogMel
from training.kokoro.text import NUM_SYMBOLS
from training.losses import (
    Discriminators,
    MelLoss,
    PhoneListener,
    discriminator_loss,
    feature_distance,
    generator_losses,
)
from training.progress import Mean, Progress, Rate, add_run_arguments
from training.recorded import Recorded
from training.speech_codec.checkpoint import DECODER, eighth_bits, halved, read, write
from training.speech_codec.coder import Coder, load_coder, symbol_losses
from training.speech_codec.config import DESIGNS, coder_sizes, save_config
from training.speech_codec.crops import Crops, Examples, Sizes, load_takes
from training.speech_codec.pitch import pitch_loss, true_drive
from training.speech_codec.plans import Plan

RESOLUTIONS = (512, 1024, 2048)  # of the spectral discriminators
MEAN_EVERY, MEAN_SHARE = 10, 0.01  # steps; of the newest weights in those that are kept
WARM_STEPS, LAST_RATE = 300, 0.05  # of the learning rate: it rises, its share at the end
MISSING_BAND = 0.4  # of the mels, at most, that the listener does without
JUDGED_FIRST = 10  # steps against discriminators before they are recorded


class Said(NamedTuple):
    """A decoder's result for a batch."""

    samples: Tensor  # float32 [B, S]
    source: Tensor  # loss of the decoder's pitch


class Model(nn.Module):
    """The network that learns: the decoder, which reads the codes of the coder."""

    def __init__(self, decoder: Decoder, coder: Coder, voice_error: float) -> None:
        super().__init__()
        self.decoder, self.coder, self.voice_error = decoder, coder, voice_error

    def forward(self, examples: Examples) -> Said:
        """In training every other row is driven by the true pitch, the others by the decoder's, and
        voice tokens have errors of any size up to `voice_error`."""
        decoder, training = self.decoder, self.training
        rows = len(examples.codes)
        with torch.no_grad(), torch.autocast(examples.target.device.type, enabled=False):
            values = self.coder.quantizer.values(examples.codes)
            share = torch.rand(rows, 1, 1, device=values.device) if training else 0.0
            voice, _ = self.coder.voice(examples.style, self.voice_error * share)
        x = decoder.features(values, voice)
        curve = decoder.curve(x)
        turns = torch.rand(rows, device=x.device, dtype=torch.float64)
        drive = decoder.drive(curve, turns)
        if training:
            true = true_drive(examples.drive, examples.turns)
            even = torch.arange(rows, device=x.device)[:, None] % 2 == 0
            pairs = zip(true, drive, strict=True)
            drive = Drive(*(torch.where(even, told, own) for told, own in pairs))
        source = pitch_loss(curve, examples.drive[:, decoder.reach :])
        noise = None if training else decoder.noise_under(drive)
        return Said(decoder.synthesise(x, drive, noise), source)


class Heard(NamedTuple):
    """Result of a listener for samples."""

    loss: Tensor
    wrong: Tensor  # share of symbols that are taken for others
    features: list[Tensor]  # of each layer, [B, width, P]


class Listener(nn.Module):
    """Recognises the phones of samples, in training also where a band of them is missing."""

    def __init__(self, config: SpeechCodecConfig, width: int) -> None:
        super().__init__()
        self.mel = LogMel(config)
        self.phones = PhoneListener(config.mel_bins, NUM_SYMBOLS, width)

    def forward(self, samples: Tensor, phones: Tensor, bands: Tensor | None = None) -> Heard:
        """Listen to samples [B, S] with the phones of their points [B, P], without the mel
        `bands` [B, mels]."""
        mel = self.mel(samples).view(*phones.shape, -1)
        if bands is not None:
            mel = mel.masked_fill(bands[:, None], 0.0)
        features = self.phones.features(mel)
        loss, wrong = symbol_losses(self.phones.logits(features).float(), phones)
        return Heard(loss, wrong, features)

    def bands(self, rows: int) -> Tensor:
        """Draw bands of up to a share of the mels: bool [rows, mels]."""
        mels = self.mel.config.mel_bins
        device = self.mel.filters.device
        width = torch.rand(rows, 1, device=device) * MISSING_BAND * mels
        first = torch.rand(rows, 1, device=device) * (mels - width)
        place = torch.arange(mels, device=device)
        return (place >= first) & (place < first + width)


class Trainer:
    """One design, its judges, its data and its clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = DESIGNS[args.design]
        takes = load_takes(sorted(args.takes.glob("take_*[0-9].npz")), self.device)
        coder = load_coder(args.coder, coder_sizes(self.config)).to(self.device)
        self.crops = Crops(takes, coder, self.config, Sizes(args.batch, args.crop))
        self.model = Model(Decoder(self.config), coder, args.voice_error).to(self.device)
        self.judges = Discriminators(args.judge_width, RESOLUTIONS).to(self.device)
        if self.device.type == "cuda":  # the layout of a GPU's matrix units
            self.judges.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.listener = Listener(self.config, args.listener_width).to(self.device)
        self.mel = MelLoss(self.config.sample_rate).to(self.device)
        learners = (self.model, self.judges, self.listener)
        self.player, self.critic, self.hearing = map(self._optimiser, learners)
        self.rate = Rate(args.lr, WARM_STEPS, LAST_RATE)
        self.judged_steps = 0
        self.recorded: Recorded | None = None
        self.progress = Progress(args.minutes, args.steps, args.log)
        if args.start:
            self._resume(args.start)
        self.mean = Mean(self.model.decoder, MEAN_EVERY, MEAN_SHARE)

    def _optimiser(self, network: nn.Module) -> torch.optim.AdamW:
        """Create an optimiser; on a GPU its rate is a tensor too, as a recorded step needs."""
        on_gpu = self.device.type == "cuda"
        return torch.optim.AdamW(
            network.parameters(),
            lr=torch.tensor(self.args.lr, device=self.device) if on_gpu else self.args.lr,
            betas=(0.8, 0.99), weight_decay=0.01, fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip

    def _resume(self, start: Path) -> None:
        """Load a file of an earlier run, and the judges next to it. Of another design those tensors
        are taken that fit; the file's name is the design's."""
        found, name = read(start), start.name.split(".")[0]
        found = {k.removeprefix(DECODER): v for k, v in found.items() if k.startswith(DECODER)}
        own = self.model.decoder.state_dict()
        first = "input.weight"
        if first in found:
            found[first] = farther(found[first], own[first])
        fits = {k: v for k, v in found.items() if k in own and own[k].shape == v.shape}
        self.model.decoder.load_state_dict(fits, strict=name == self.args.design)
        new, unused = sorted(own.keys() - fits), sorted(found.keys() - fits)
        if new or unused:
            self.log(f"{len(fits)} tensors from {start}; new: {new}; left out: {unused}")
        judges = start.with_name(f"{name}.judges.safetensors")
        if judges.exists():
            self.judges.load_state_dict(read(judges))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def window(self, samples: Tensor) -> Tensor:
        """Without the crop's edges, where codes have no neighbours."""
        config = self.config
        return samples[:, config.behind * config.hop : (self.args.crop - config.ahead) * config.hop]

    def points(self, values: Tensor) -> Tensor:
        """Leave the same edges of a crop's points out."""
        config = self.config
        first, last = config.behind, self.args.crop - config.ahead
        return values[:, first * config.spectra_per_code : last * config.spectra_per_code]

    def train_step(self, share: float) -> dict[str, Tensor]:
        """Return the losses of one step of all, at this share of the run."""
        self.rate.set(self.progress.step, share, self.player, self.critic, self.hearing)
        seen = self._next_step(share)
        self.judged_steps += "fooled" in seen
        self.mean.update(self.progress.step + 1)
        return seen

    def _next_step(self, share: float) -> dict[str, Tensor]:
        given = self._given()
        if share < self.args.alone and not self.judged_steps:
            return self._step(*given, judging=False)
        if self.device.type == "cuda" and self.judged_steps >= JUDGED_FIRST:
            return self._replayed(given)
        return self._step(*given)

    def _learn(self, loss: Tensor) -> Tensor:
        """Take the decoder's step, and return the norm of its gradients."""
        self.player.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.decoder.parameters(), self.args.clip)
        self.player.step()
        return norm

    def _given(self) -> list[Tensor]:
        """Return a batch's tensors, and the first sample of what the discriminators get."""
        examples = self.crops.draw(self.crops.training)
        last = self._heard - self._judged_size
        first = torch.randint(last + 1, (1,), device=self.device)
        return [*examples[:-1], *examples.plan, first]

    @property
    def _heard(self) -> int:
        """Samples of a crop without its edges."""
        return (self.args.crop - self.config.behind - self.config.ahead) * self.config.hop

    @property
    def _judged_size(self) -> int:
        return min(self.args.judged * self.config.hop, self._heard)

    def _replayed(self, given: list[Tensor]) -> dict[str, Tensor]:
        """One step against discriminators from its recording, which is made first."""
        if self.recorded is None:
            self.recorded = Recorded(self._step, given)
            self.log("recorded a step")
        return self.recorded(*given)

    def _step(self, *given: Tensor, judging: bool = True) -> dict[str, Tensor]:
        """Return the losses of one step on given tensors."""
        args, count = self.args, len(Examples._fields) - 1
        examples = Examples(*given[:count], Plan(*given[count:-1]))
        with self.autocast():
            got, source = self.model(examples)
        got, wanted = self.window(got), self.window(examples.target)
        mel, timbre = self.mel(got, wanted)
        loss = args.mel_weight * (mel + args.timbre_weight * timbre)
        loss = loss + args.source_weight * source
        misheard = self._listen(wanted, got, self.points(examples.plan.phones))
        trust = (-misheard["heard"].detach()).exp()  # in a listener that understands the teacher
        loss = loss + args.hear_weight * trust * misheard["misheard"]
        loss = loss + args.alike_weight * trust * misheard["alike"]
        seen = {"mel": mel, "timbre": timbre, "source": source, **misheard}
        if judging:
            judged = self._judge(wanted, got, given[-1])
            loss = loss + args.fool_weight * judged["fooled"] + args.match_weight * judged["match"]
            seen |= judged
        seen["norm"] = self._learn(loss)
        return {name: value.detach() for name, value in seen.items()}

    def _listen(self, real: Tensor, fake: Tensor, phones: Tensor) -> dict[str, Tensor]:
        """The listener's step on the teacher's speech, then its losses of the decoder's."""
        bands = self.listener.bands(len(real))
        with self.autocast():
            heard = self.listener(real, phones, bands)
        self.hearing.zero_grad(set_to_none=True)
        heard.loss.backward()
        self.hearing.step()
        self.listener.requires_grad_(requires_grad=False)
        wanted = [part.detach() for part in heard.features]
        with self.autocast():
            misheard = self.listener(fake, phones, bands)
            alike = feature_distance(misheard.features, wanted)
        self.listener.requires_grad_(requires_grad=True)
        losses = {"heard": heard.loss, "misheard": misheard.loss, "alike": alike}
        return losses | {"taken": misheard.wrong}

    def _judge(self, real: Tensor, fake: Tensor, first: Tensor) -> dict[str, Tensor]:
        """A second of each from a sample on: the critic's step, then how the decoder fared."""
        place = first + torch.arange(self._judged_size, device=self.device)
        real, fake = (sound.gather(1, place.expand(len(sound), -1)) for sound in (real, fake))
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

    @torch.no_grad()
    def held_out(self) -> str:
        """The kept weights on sessions that are not learned from, same voice and crossed."""
        lines = self.crops.held_out if len(self.crops.held_out) else self.crops.training
        model = Model(self.mean.network, self.model.coder, 0.0).to(self.device).eval()
        examples = self.crops.draw(lines, torch.Generator(self.device).manual_seed(0))
        with self.autocast():
            got, source = model(examples)
        parts = []
        for name, rows in (("same", ~examples.crosses), ("crossed", examples.crosses)):
            if rows.any():
                mel, _ = self.mel(self.window(got)[rows], self.window(examples.target)[rows])
                parts.append(f"{name} mel {mel.item():.3f}")
        phones = self.points(examples.plan.phones)
        with self.autocast():
            real = self.listener(self.window(examples.target), phones).wrong
            fake = self.listener(self.window(got), phones).wrong
        parts.append(f"source {source.item():.3f}")
        parts.append(f"misheard {fake.item():.4f}, the teacher's {real.item():.4f}")
        return f"held out: {', '.join(parts)}"

    def save(self) -> None:
        """Everything that is kept, whole."""
        args = self.args
        kept = self.mean.network.state_dict()
        state = halved({f"{DECODER}{name}": value for name, value in kept.items()})
        write(state, args.out / f"{args.design}.safetensors")
        write(eighth_bits(state), args.out / f"{args.design}.8bit.safetensors")
        write(halved(self.judges.state_dict()), args.out / f"{args.design}.judges.safetensors")
        save_config(self.config, args.out / f"{args.design}.json")

    def log(self, *parts: object) -> None:
        self.progress.clock.log(self.args.design, *parts)


def farther(weight: Tensor, wanted: Tensor) -> Tensor:
    """Return a first layer's weight [out, levels, codes] for as many codes ahead as `wanted` has,
    with zeros for those that it has not seen."""
    return F.pad(weight, (0, max(0, wanted.shape[-1] - weight.shape[-1])))


def halves(both: list[tuple[Tensor, list[Tensor]]]) -> tuple[list, list]:
    """Split the results of the discriminators into those of a batch's first and second half."""
    first, second = [], []
    for score, features in both:
        middle = len(score) // 2
        first.append((score[:middle], [part[:middle] for part in features]))
        second.append((score[middle:], [part[middle:] for part in features]))
    return first, second


def train(args: argparse.Namespace) -> None:
    """Until the time is over."""
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args)
    trainer.log(f"{trainer.crops.hours:.1f} h in {len(trainer.crops.training)} lines "
                f"and {len(trainer.crops.held_out)} held out, on {trainer.device}")  # fmt: skip
    progress, saved = trainer.progress, time.monotonic()
    for share in progress:
        seen = trainer.train_step(share)
        if progress.log_losses(seen) and not all(map(torch.isfinite, seen.values())):
            raise SystemExit(f"{args.design}: the loss is not finite at step {progress.step + 1}")
        if time.monotonic() - saved > args.save:
            trainer.save()
            trainer.log(trainer.held_out())
            saved = time.monotonic()
    trainer.save()
    trainer.log(trainer.held_out())
    if trainer.device.type == "cuda":
        trainer.log(f"peak {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB")
    trainer.log(f"done after {progress.step} steps")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--design", choices=sorted(DESIGNS), required=True)
    for name in ("takes", "coder", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    add_run_arguments(parser)
    parser.add_argument("--start", type=Path, help="weights of an earlier run to continue")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--crop", type=int, default=40, help="codes")
    parser.add_argument("--judged", type=int, default=25, help="codes that the judges see")
    parser.add_argument("--judge-width", type=int, default=32)
    parser.add_argument("--alone", type=float, default=0.1, help="share of time without judges")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--clip", type=float, default=10.0)
    parser.add_argument("--mel-weight", type=float, default=6.0)
    parser.add_argument("--timbre-weight", type=float, default=20.0)
    parser.add_argument("--voice-error", type=float, default=0.4, help="of voice tokens, at most")
    parser.add_argument("--source-weight", type=float, default=4.0, help="of the decoder's pitch")
    parser.add_argument("--hear-weight", type=float, default=1.0, help="of phones in the sound")
    parser.add_argument("--alike-weight", type=float, default=1.0, help="of the listener's layers")
    parser.add_argument("--listener-width", type=int, default=256)
    parser.add_argument("--fool-weight", type=float, default=0.5)
    parser.add_argument("--match-weight", type=float, default=1.0)
    parser.add_argument("--save", type=float, default=120.0, help="seconds")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
