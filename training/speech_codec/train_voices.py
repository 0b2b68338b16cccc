"""Train the encoder of voices: from a clip to the voice tokens of who speaks in it.

    python -m training.speech_codec.train_voices --takes runs/takes \
        --coder runs/coder/coder.safetensors --out runs/codec --minutes 3

The teacher's own style vector says which tokens are right. Clips of 2 to 8 s are recorded as people
record them (`recordings`). OUT/voices.safetensors holds the running mean of the weights (float16).
--start FILE continues those of an earlier training, or of a codec; --keep SHARE of them stays in
what is written, which loses less of what they knew (a mean of weights, arXiv 2109.01903).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.modules import LogMel, VoiceEncoder
from training.progress import Mean, Progress, Rate, add_run_arguments, run_to_the_end
from training.speech_codec.checkpoint import VOICE_ENCODER, halved, read, write
from training.speech_codec.coder import load_coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.recordings import at_peak, recorded, telephone

SHORTEST_S, LONGEST_S = 2.0, 8.0
STEP_S = 0.25  # between lengths: on a GPU the first spectra of each size take a tenth of a second
WARM_STEPS, LAST_RATE = 200, 0.02  # of the learning rate: it rises, its share at the end
MEAN_EVERY, MEAN_SHARE = 5, 0.02  # steps; of the newest weights in those that are kept
HELD_OUT = 48  # every so many sessions one is not learned from
HELD_OUT_CLIPS, HELD_OUT_S = 64, 4.0
CLEAN_SHARE = 0.4  # of the batches
PHONE_PEAK = 0.7
VOICES_FILE = "voices.safetensors"


class Sessions:
    """The speech of every session in its own voice, on the device."""

    def __init__(self, paths: Sequence[Path], device: torch.device) -> None:
        """Raises ValueError where there are none."""
        parts: dict[str, list[np.ndarray]] = {n: [] for n in ("own", "start", "end", "style")}
        samples = 0
        for path in paths:
            with np.load(path) as stored:
                take = {name: stored[name] for name in parts}
            for name, value in take.items():
                parts[name].append(value + samples if name in ("start", "end") else value)
            samples += len(take["own"])
        if not samples:
            raise ValueError("there are no takes to learn from")
        whole = {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}
        self.own, self.start, self.end = (whole[n].to(device) for n in ("own", "start", "end"))
        self.style = whole["style"].to(device).float()
        order = torch.arange(len(self.start), device=device)
        self.training, self.held_out = order[order % HELD_OUT > 0], order[order % HELD_OUT == 0]

    def draw(self, sessions: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Clips float32 [count, size], repeated where a session is shorter, and styles."""
        picked = sessions[torch.randint(len(sessions), (count,), device=sessions.device)]
        length = self.end[picked] - self.start[picked]
        share = torch.rand(count, device=picked.device)
        first = (share * (length - size).clamp_min(0)).long()
        index = (first[:, None] + torch.arange(size, device=picked.device)) % length[:, None]
        return self.own[self.start[picked, None] + index].float() / 32768, self.style[picked]


class Model(nn.Module):
    """The encoder and what stands before it."""

    def __init__(self, config: SpeechCodecConfig) -> None:
        super().__init__()
        self.mel = LogMel(config)
        self.encoder = VoiceEncoder(config, self.mel.width)

    def forward(self, clips: Tensor) -> Tensor:
        """Clips [B, S] to latent values [B, K, levels]."""
        return self.encoder(self.mel(clips))


def encoder_of(path: Path) -> dict[str, Tensor]:
    """Read an encoder's weights, of its own file or of a codec's. Raises ValueError for none."""
    stored = read(path).items()
    own = {n.removeprefix(VOICE_ENCODER): v for n, v in stored if n.startswith(VOICE_ENCODER)}
    if not own:
        raise ValueError(f"{path} has no encoder of voices")
    return own


def distance(latent: Tensor, wanted: Tensor) -> Tensor:
    """Mean square of the bounded values' difference."""
    return (latent.tanh() - wanted.tanh()).square().mean()


class Trainer:
    """The encoder of voices, its data and its optimiser."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.config = args, DESIGNS[args.design]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.sessions = Sessions(sorted(args.takes.glob("take_*[0-9].npz")), self.device)
        self.coder = load_coder(args.coder, coder_sizes(self.config)).to(self.device)
        self.model = Model(self.config).to(self.device)
        self.start = encoder_of(args.start) if args.start else {}
        if self.start:
            self.model.encoder.load_state_dict(self.start)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.rate = Rate(args.lr, WARM_STEPS, LAST_RATE)
        self.mean = Mean(self.model, MEAN_EVERY, MEAN_SHARE)
        self.rng = random.Random(args.seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return clips of one length, recorded or clean, and their styles."""
        seconds = SHORTEST_S + STEP_S * self.rng.randint(
            0, round((LONGEST_S - SHORTEST_S) / STEP_S)
        )
        count = max(2, int(self.args.batch * LONGEST_S / seconds))
        clips, style = self.sessions.draw(self.sessions.training, count, self.samples(seconds))
        if self.rng.random() >= CLEAN_SHARE:
            clips = recorded(clips, self.config.sample_rate)
        return clips, style

    def samples(self, seconds: float) -> int:
        """Return the number of samples in whole frames."""
        return int(seconds * self.config.sample_rate) // self.config.frame * self.config.frame

    def train_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Return the loss of the step after `step` others, at this share of the run."""
        self.rate.set(step, share, self.optimiser)
        clips, style = self.draw()
        wanted = self.coder.style(style)
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = distance(self.model(clips), wanted)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimiser.step()
        self.mean.update(step + 1)
        return {"distance": loss.detach()}

    @torch.no_grad()
    def held_out(self) -> str:
        """Return how far voices of clips are from their own tokens, and from another session's."""
        sessions = self.sessions
        chosen = sessions.held_out if len(sessions.held_out) > 1 else sessions.training
        count = min(HELD_OUT_CLIPS, 4 * len(chosen))
        clips, style = sessions.draw(chosen, count, self.samples(HELD_OUT_S))
        wanted = self.coder.style(style)
        same = (style[:, None] - style[None]).abs().amax(2) < 1e-4
        rate, parts = self.config.sample_rate, []
        phone = telephone(at_peak(clips, PHONE_PEAK), rate)
        kinds = {"clean": clips, "recorded": recorded(clips, rate), "telephone": phone}
        for name, heard in kinds.items():
            latent = self.mean.network(heard)
            own, error = distance(latent, wanted).item(), (latent - wanted).std().item()
            gaps = (latent[:, None].tanh() - wanted[None].tanh()).square().mean((2, 3))
            nearest = same.gather(1, gaps.argmin(1, keepdim=True)).float().mean().item()
            parts.append(f"{name} {own:.4f}, error of latents {error:.2f}, "
                         f"nearest is the own one in {nearest:.2f}")  # fmt: skip
        other = distance(wanted, wanted.roll(1, 0)).item()
        return f"held out: {'; '.join(parts)}; others {other:.4f}"

    def save(self) -> None:
        """Write the encoder, with its share of the start, under its names in a codec."""
        state = self.mean.network.encoder.state_dict()
        for name, value in self.start.items():
            if state[name].is_floating_point():
                state[name].lerp_(value.to(self.device), self.args.keep)
        own = {f"{VOICE_ENCODER}{name}": value for name, value in state.items()}
        write(halved(own), self.args.out / VOICES_FILE)


def train(args: argparse.Namespace) -> None:
    """Train until the time is over."""
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer, progress = Trainer(args), Progress(args.minutes, args.steps, args.log)
    if args.start:
        progress.clock.log(f"{trainer.held_out()} before")
    run_to_the_end(trainer, progress)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("takes", "coder", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    add_run_arguments(parser)
    parser.add_argument("--design", choices=sorted(DESIGNS), default="source_free")
    parser.add_argument("--batch", type=int, default=32, help="clips of the longest kind")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--start", type=Path, metavar="FILE", help="an encoder to continue")
    parser.add_argument("--keep", type=float, default=0.0, help="share of its weights that stays")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
