"""Train the aligner, which predicts the spoken letter from the codes alone.

    python -m training.aligner --tokens runs/tokens --phonemes runs/phonemes \
        --package runs/teacher/package --config runs/codec/source_free.json \
        --out runs/voice/aligner --minutes 5

The targets are the teacher's own times of words (`training.labels`), of lines whose words stand
side by side with their phonemes. OUT is a checkpoint's folder `aligner`: with it the service has
word times. Lines that the language model is not trained on are held out here, too.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoder.codecs.source_filter.config import SpeechCodecConfig
from decoder.codecs.source_filter.modules import FiniteScalarQuantizer
from training.aligner_network import AlignerNetwork
from training.export import write_json
from training.kokoro.packages import symbols
from training.labels import letter_labels, word_times
from training.progress import Progress, Rate, add_run_arguments, run_to_the_end
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.config import load_config
from training.speech_lm.speech import Speech, token_files
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import FIRST_CODE, Symbols
from training.timings import Line, evaluate
from tts.speech.aligner import Aligner, AlignerConfig

CROP_CODES = 128
WARM_STEPS, LAST_RATE = 200, 0.02  # of the learning rate: it rises, its share at the end


def timed_lines(speech: Speech, texts: Texts, utterances: np.ndarray) -> Iterator[Line]:
    """Iterate over the utterances whose words have known times."""
    for utterance in utterances.tolist():
        words = word_times(texts, int(speech.text[utterance]), speech.durations[utterance])
        if words:
            codes = speech.said(np.array([utterance])) - FIRST_CODE
            yield Line(tuple(codes.tolist()), words)


class LevelTable(nn.Module):
    """A row per code and a row per FSQ level, so that similar codes share most of their values."""

    level_index: Tensor

    def __init__(self, levels: tuple[int, ...], width: int) -> None:
        super().__init__()
        quantizer = FiniteScalarQuantizer(levels)
        codes = torch.arange(math.prod(levels))
        index = (codes[:, None] // quantizer.strides) % quantizer.levels
        starts = torch.tensor([sum(levels[:i]) for i in range(len(levels))])
        self.register_buffer("level_index", index + starts, persistent=False)
        self.rows = nn.Embedding(sum(levels), width)
        self.own = nn.Embedding(math.prod(levels), width)
        nn.init.normal_(self.own.weight, std=0.02)

    def forward(self) -> Tensor:
        """Return the table [codebook, width]."""
        return self.own.weight + self.rows(self.level_index).sum(1)


class Crops:
    """Codes of lines, one after the other, and the letter of every frame, on a device."""

    def __init__(self, lines: Iterator[Line], rates: tuple[float, int], device: torch.device):
        """`rates`: codes per second, frames per code. Raises ValueError for too few codes."""
        codes, letters = [], []
        for line in lines:
            frames = rates[1] * len(line.codes)
            codes.append(np.array(line.codes, np.int32))
            letters.append(letter_labels(line.words, frames, rates[0] * rates[1]))
        if sum(map(len, codes)) <= CROP_CODES:
            raise ValueError("there are too few lines whose words have known times")
        self.num_lines, self.frames_per_code = len(codes), rates[1]
        self.codes = torch.from_numpy(np.concatenate(codes)).to(device)
        self.letters = torch.from_numpy(np.concatenate(letters)).to(device)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return codes [size, T] and labels [size, T * frames_per_code]."""
        device, frames = self.codes.device, self.frames_per_code
        start = torch.randint(0, len(self.codes) - CROP_CODES, (size, 1), device=device)
        codes = self.codes[start + torch.arange(CROP_CODES, device=device)]
        labels = self.letters[frames * start + torch.arange(frames * CROP_CODES, device=device)]
        return codes.long(), labels.long()


class Trainer:
    """The aligner, its data and its optimiser."""

    def __init__(self, args: argparse.Namespace, codec: SpeechCodecConfig) -> None:
        self.args, self.codes_per_s = args, codec.sample_rate / codec.hop
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.network = AlignerNetwork(AlignerConfig(codec.codebook_size)).to(self.device)
        self.table = LevelTable(codec.levels, self.network.config.table_width).to(self.device)
        texts = Texts.load(args.phonemes, Symbols(symbols(args.package)))
        speech = Speech(token_files(args.tokens), texts)
        self.judged = list(timed_lines(speech, texts, speech.held_out))
        rates = self.codes_per_s, self.network.config.frames_per_code
        self.crops = Crops(timed_lines(speech, texts, speech.train), rates, self.device)
        self.parameters = [
            *self.network.layers.parameters(),
            *self.network.output.parameters(),
            *self.table.parameters(),
        ]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=args.lr, weight_decay=0.01)
        self.rate = Rate(args.lr, WARM_STEPS, LAST_RATE)
        hours = len(self.crops.codes) / self.codes_per_s / 3600
        print(f"{hours:.1f} h: {self.crops.num_lines} of {len(speech.train)} lines, and "
              f"{len(self.judged)} of {len(speech.held_out)} held out", flush=True)  # fmt: skip

    def train_step(self, step: int, share: float) -> dict[str, Tensor]:
        """Return the loss of the step after `step` others, at this share of the run."""
        self.rate.set(step, share, self.optimiser)
        codes, letters = self.crops.batch(self.args.batch)
        logits = self.network.letters(F.embedding(codes, self.table()))
        loss = F.cross_entropy(logits.flatten(0, 1), letters.flatten())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        return {"letters": loss.detach()}

    @torch.no_grad()
    def save(self) -> None:
        """Write the folder that the service loads."""
        self.network.table.weight.copy_(self.table())
        write_json(self.args.out / "config.json", asdict(self.network.config))
        write(halved(self.network.state_dict()), self.args.out / "model.safetensors")

    def held_out(self) -> str:
        """Return the error of word times of the folder that was written."""
        if not self.judged:
            return "no line is held out,"
        report = evaluate(Aligner.load(self.args.out), self.judged, self.codes_per_s)
        figures = (f"{figure.name} {figure.cells()[1]}" for figure in report.figures)
        return f"held out: {', '.join(figures)}"


def train(args: argparse.Namespace) -> None:
    """Train until the time is over."""
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args, load_config(args.config))
    run_to_the_end(trainer, Progress(args.minutes, args.steps, args.log))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tokens", "phonemes", "package", "config", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    add_run_arguments(parser)
    parser.add_argument("--batch", type=int, default=128, help="crops")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    train(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
