"""Train the codec in two stages, while the teacher's speech is still being synthesized.

    python -m training.codec reconstruct --speech runs/speech --out runs --until 400
    python -m training.codec adversarial --speech runs/speech --out runs --until 1400 \
        --init runs/codec_stage1.safetensors

Stage 1 trains encoder, codebook and decoder with the mel distance and the recognition loss of the
phones; then encoder and codebook are frozen, so that speech can be tokenised, and stage 2
trains the decoder against discriminators.
Every step draws a random block length for the masks, so that the decoder learns to stream.
Times are seconds since RECIPE_START (or since this process started).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoder.codecs.embedded.modules import CodecConfig, EmbeddedCodec
from training.distributed import Clock, Deadline, Group
from training.labels import FRAME, NUM_PHONE_LABELS
from training.losses import (
    Discriminators,
    MelLoss,
    PhoneListener,
    discriminator_loss,
    generator_losses,
)
from training.recipe import parse
from training.shards import FAILED, read_clips

BLOCKS = (0, 0, 3, 4, 6, 8, 12, 16, 25)  # codes; 0 = the whole crop is one block
CROP_CODES = 50


class SpeechPool:
    """Synthesised samples and their phones on the device, extended as shards grow; random crops."""

    def __init__(self, folder: Path, hop: int, max_hours: float, device: torch.device) -> None:
        size = int(max_hours * 3600 * 16_000) // hop * hop
        self.samples = torch.empty(size, dtype=torch.int16, device=device)
        self.phones = torch.empty(size // FRAME, dtype=torch.uint8, device=device)
        self.folder, self.hop, self.used = folder, hop, 0
        self._taken: dict[Path, int] = {}

    def refresh(self) -> None:
        for pcm, clips in read_clips(self.folder):
            end = clips[-1].offset + clips[-1].length if clips else 0
            start = self._taken.get(pcm, 0)
            count = min(end - start, len(self.samples) - self.used)
            if count <= 0:
                continue
            data = np.fromfile(pcm, dtype=np.int16, count=count, offset=2 * start)
            labels = np.fromfile(
                pcm.with_suffix(".phone"), np.uint8, count=count // FRAME, offset=start // FRAME
            )
            self.samples[self.used : self.used + count] = torch.from_numpy(data)
            first = self.used // FRAME
            self.phones[first : first + len(labels)] = torch.from_numpy(labels)
            self.used += count
            self._taken[pcm] = start + count

    def batch(self, size: int, codes: int) -> tuple[Tensor, Tensor]:
        """Return float32 [size, codes * hop] in [-1, 1), on the code grid; and phones int64 [size,
        F].
        """
        device, length = self.samples.device, codes * self.hop
        start = torch.randint(0, (self.used - length) // self.hop, (size, 1), device=device)
        index = start * self.hop + torch.arange(length, device=device)
        frames = start * (self.hop // FRAME) + torch.arange(length // FRAME, device=device)
        return self.samples[index].float() / 32768, self.phones[frames].long()


def block_mask(length: int, device: torch.device) -> Tensor | None:
    """Return a random block-causal mask [T, T]: a code attends to its own block and earlier
    ones.
    """
    block = random.choice(BLOCKS)
    if block == 0:
        return None
    ids = (torch.arange(length, device=device) + random.randrange(block)) // block
    return ids[:, None] >= ids[None, :]


def initialise(codec: EmbeddedCodec) -> None:
    """Initialise residual branches with small values, so that a deep stack starts near the
    identity.
    """
    for body in (codec.encoder.body, codec.decoder.body):
        std = 0.02 / (2 * len(body.blocks)) ** 0.5
        for block in body.blocks:
            nn.init.normal_(block.attention_out.weight, std=std)
            nn.init.normal_(block.ff_out.weight, std=std)


def load_codec(codec: EmbeddedCodec, path: str | Path) -> None:
    """Load weights that were saved in half precision."""
    codec.load_state_dict({k: v.float() for k, v in load_file(path).items()})


class PhoneScorer:
    """A phone recogniser that is trained on real speech and scores decoded speech."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, config = trainer, trainer.config
        width = trainer.args.ear_width
        self.listener = PhoneListener(config.mel_bins, NUM_PHONE_LABELS, width).to(trainer.device)
        self.parameters = list(self.listener.parameters())
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.98))

    def _score(self, samples: Tensor, phones: Tensor) -> Tensor:
        """Return the mean cross-entropy of the phones in samples [B, S]."""
        config = self.trainer.config
        mel = self.trainer.codec.encoder.log_mel(samples) / 4 + 2
        with self.trainer.autocast():
            logits = self.listener(mel.reshape(len(samples), -1, config.mel_bins))
        return F.cross_entropy(logits.float().flatten(0, 1), phones.flatten())

    def learn(self, real: Tensor, phones: Tensor) -> Tensor:
        """Train on real speech for one step; return its loss."""
        loss = self._score(real, phones)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.trainer.group.average_gradients(self.parameters)
        self.optimiser.step()
        return loss.detach()

    def judge(self, decoded: Tensor, phones: Tensor) -> Tensor:
        """Return the recognition loss of the decoded samples; only they get a gradient."""
        self.listener.requires_grad_(False)
        loss = self._score(decoded, phones)
        self.listener.requires_grad_(True)
        return loss


class Trainer:
    """Common parts of both stages: data, masks, precision, log, saving."""

    def __init__(self, args: argparse.Namespace, config: CodecConfig) -> None:
        self.args, self.clock, self.group = args, Clock(), Group()
        torch.manual_seed(args.seed + self.group.rank)
        random.seed(args.seed + self.group.rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        self.device = self.group.device
        self.config = config
        self.codec = EmbeddedCodec(config).to(self.device)
        self.mel_loss = MelLoss(self.config.sample_rate).to(self.device)
        self.phone_scorer = PhoneScorer(self)
        self.pool = SpeechPool(args.speech, self.config.hop, args.max_hours, self.device)
        self._await_speech(max(args.min_hours * 3600 * 16_000, 2 * CROP_CODES * self.config.hop))
        self.log("codec", args.stage, f"{self.pool.used / 16_000 / 3600:.1f} h of speech")

    def _await_speech(self, needed: float) -> None:
        """Wait until the pool has so many samples."""
        self.pool.refresh()
        while self.pool.used < needed:
            there = (
                f"{self.pool.used / 16_000:.0f} s of speech are there, {needed / 16_000:.0f} needed"
            )
            if (self.args.speech / FAILED).exists():
                raise SystemExit(f"the stage synthesis has failed: {there}")
            if self.clock.now() > self.args.until:
                raise SystemExit(f"the time is over: {there}")
            time.sleep(0.5)
            self.pool.refresh()

    def log(self, *parts: object) -> None:
        if self.group.is_first:
            self.clock.log(*parts)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.group.is_cuda)

    def render(self, samples: Tensor, *, frozen: bool) -> tuple[Tensor, Tensor]:
        """Encode and decode; return samples without the first code's fade-in, and codes."""
        with self.autocast():
            with torch.set_grad_enabled(not frozen):
                values, codes = self.codec.encode(samples)
            return self.codec.decoder(values, block_mask(values.shape[1], self.device)), codes

    def save(self, state: dict[str, Tensor], name: str) -> None:
        if self.group.is_first:
            half = {k: v.detach().half().cpu().contiguous() for k, v in state.items()}
            save_file(half, self.args.out / f"{name}.tmp")
            (self.args.out / f"{name}.tmp").rename(self.args.out / f"{name}.safetensors")


def reconstruct(args: argparse.Namespace, config: CodecConfig) -> None:
    """Run stage 1."""
    trainer = Trainer(args, config)
    group, codec, clock = trainer.group, trainer.codec, trainer.clock
    if args.start:
        load_codec(codec, args.start)
    else:
        initialise(codec)
    group.broadcast(codec.state_dict().values())
    parameters = list(codec.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    deadline = Deadline(clock, group, args.until, args.steps)
    step, hop, last = 0, trainer.config.hop, clock.now()
    while (share := deadline.share(step)) < 1:
        for setting in optimiser.param_groups:
            setting["lr"] = args.lr * min(1.0, (step + 1) / 300) * (1 - 0.95 * share)
        wanted, phones = trainer.pool.batch(args.batch, CROP_CODES)
        heard = trainer.phone_scorer.learn(wanted, phones)
        got, codes = trainer.render(wanted, frozen=False)
        mel, timbre = trainer.mel_loss(got[:, hop:], wanted[:, hop:])
        phone = trainer.phone_scorer.judge(got, phones)
        loss = mel + args.timbre_weight * timbre
        loss = loss + args.phone_weight * min(1.0, step / 1000) * phone
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        group.average_gradients(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        step += 1
        if step % 250 == 0 or step in (1, 20):
            used = len(torch.unique(codes))
            pace = (clock.now() - last) / (250 if step > 250 else step) * 1e3
            trainer.log(f"stage 1 step {step} mel {mel.item():.3f}",
                        f"timbre {timbre.item() ** 0.5:.4f} gradient {norm.item():.2f}",
                        f"phones {phone.item():.3f} (real {heard.item():.3f})",
                        f"codes {used} of {codes.numel()} {pace:.0f} ms")  # fmt: skip
            last = clock.now()
            if step % 1000 == 0:
                trainer.save(codec.state_dict(), "codec_stage1_partial")
                trainer.pool.refresh()
                last = clock.now()
    trainer.save(codec.state_dict(), "codec_stage1")
    trainer.log("stage 1 done", step, "steps")
    group.close()


class Adversary:
    """Decoder and discriminators of stage 2, each with an optimiser."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.codec = trainer, trainer.codec
        self.codec.encoder.requires_grad_(False)
        self.parameters = list(self.codec.decoder.parameters())
        self.judges = Discriminators(trainer.args.judge_width).to(trainer.device)
        settings = {"lr": trainer.args.lr, "betas": (0.8, 0.99), "weight_decay": 0.01}
        self.generator = torch.optim.AdamW(self.parameters, **settings)
        self.critic = torch.optim.AdamW(self.judges.parameters(), **settings)
        self.average = {k: v.detach().clone() for k, v in self.codec.state_dict().items()}

    def set_lr(self, lr: float) -> None:
        for setting in (*self.generator.param_groups, *self.critic.param_groups):
            setting["lr"] = lr

    def teach_critic(self, real: Tensor, fake: Tensor) -> Tensor:
        with self.trainer.autocast():
            loss = discriminator_loss(self.judges(real), self.judges(fake.detach()))
        self.critic.zero_grad(set_to_none=True)
        loss.backward()
        self.trainer.group.average_gradients(self.judges.parameters())
        nn.utils.clip_grad_norm_(self.judges.parameters(), 5.0)
        self.critic.step()
        return loss.detach()

    def judge(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        """Return adversarial and feature-matching loss of the decoder's samples."""
        self.judges.requires_grad_(False)
        with self.trainer.autocast():
            with torch.no_grad():
                real_scores = self.judges(real)
            losses = generator_losses(real_scores, self.judges(fake))
        self.judges.requires_grad_(True)
        return losses

    def step(self, step: int) -> tuple[Tensor, ...]:
        """Run one step of both; return mel, discriminator, adversarial and matching loss."""
        trainer, hop = self.trainer, self.trainer.config.hop
        wanted, phones = trainer.pool.batch(trainer.args.batch, CROP_CODES)
        trainer.phone_scorer.learn(wanted, phones)
        got, _ = trainer.render(wanted, frozen=True)
        a = random.randrange(1, CROP_CODES // 2) * hop
        real, fake = wanted[:, a : a + 25 * hop], got[:, a : a + 25 * hop]
        critic_loss = self.teach_critic(real, fake)
        fooled, matching = self.judge(real, fake)
        mel, timbre = trainer.mel_loss(got[:, hop:], wanted[:, hop:])
        weight = min(1.0, step / 500)
        phone = trainer.args.phone_weight * weight * trainer.phone_scorer.judge(got, phones)
        loss = trainer.args.mel_weight * (mel + trainer.args.timbre_weight * timbre + phone)
        loss = loss + weight * (fooled / 3 + 2 * matching / 5)
        self.generator.zero_grad(set_to_none=True)
        loss.backward()
        trainer.group.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 2.0)
        self.generator.step()
        if step % 10 == 0:
            self.update_average()
        return mel.detach(), critic_loss, fooled.detach(), matching.detach()

    @torch.no_grad()
    def update_average(self) -> None:
        for key, value in self.codec.state_dict().items():
            self.average[key].lerp_(value, self.trainer.args.average)


def adversarial(args: argparse.Namespace, config: CodecConfig) -> None:
    """Run stage 2, which only trains the decoder."""
    trainer = Trainer(args, config)
    clock = trainer.clock
    group = trainer.group
    load_codec(trainer.codec, args.init)
    adversary = Adversary(trainer)
    group.broadcast(adversary.judges.state_dict().values())
    deadline = Deadline(clock, group, args.until, args.steps)
    step, last, saved = 0, clock.now(), clock.now()
    while (share := deadline.share(step)) < 1:
        adversary.set_lr(args.lr * min(1.0, (step + 1) / 200) * (1 - 0.95 * share))
        mel, critic, fooled, matching = adversary.step(step)
        step += 1
        if step % 250 == 0 or step in (1, 20):
            pace = (clock.now() - last) / (250 if step > 250 else step) * 1e3
            trainer.log(
                f"stage 2 step {step} mel {mel.item():.3f} critic {critic.item():.3f} "
                f"fooled {fooled.item():.3f} matching {matching.item():.3f} {pace:.0f} ms"
            )
            last = clock.now()
        if clock.now() - saved > 100:
            trainer.save(adversary.average, "codec")
            trainer.pool.refresh()
            saved = last = clock.now()
    trainer.save(adversary.average, "codec")
    trainer.log("stage 2 done", step, "steps")
    group.close()


STAGES = {"reconstruct": reconstruct, "adversarial": adversarial}


def main(argv: Sequence[str] | None = None) -> None:
    stage, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if stage not in STAGES:
        raise SystemExit(f"{__doc__}\ngive a stage: {' or '.join(STAGES)}")
    parser = argparse.ArgumentParser(prog=f"training.codec {stage}", description=__doc__)
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since RECIPE_START")
    if stage == "adversarial":
        parser.add_argument("--init", type=Path, required=True, help="stage 1 weights")
    args, recipe = parse(parser, stage, rest)
    args.stage = stage
    args.out.mkdir(parents=True, exist_ok=True)
    STAGES[stage](args, recipe.codec)


if __name__ == "__main__":
    main()
