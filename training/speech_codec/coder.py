"""Codes of what is said, from the teacher's plans, and voice tokens of its style vectors.

    plan  --10 ms--> pairs, 20 ms --ConvNeXt--> pairs, 40 ms --ConvNeXt, FSQ--> codes, 25 a second
    style vector --linear, FSQ--> voice tokens, a fixed row

Neither sees a sound: what is said has no timbre in it, and the same voice has the same tokens in
every sentence. What reads them back (`Reader`) is thrown away after training.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from decoder.codecs.source_filter.modules import ConvNext, Even, FiniteScalarQuantizer
from training.kokoro.text import NUM_SYMBOLS
from training.speech_codec.plans import POINT, Plan

CODER_FILE = Path(__file__).with_name("coder.safetensors")
"""The weights that write the codes. Others write other codes: decoder, language model and aligner
would have to be trained again."""
READER_FILE = CODER_FILE.with_name("reader.safetensors")
"""The weights that read them."""
CODER = "coder."  # before the names of a file's tensors
STYLE = 256
PHONE_DIM = 48
FRAMES = 2  # of a code, in its reader
PARTS = 3  # of a point, without its phone: octaves, voiced, energy


class Sizes(NamedTuple):
    """Sizes of a coder."""

    levels: tuple[int, ...]
    voice_tokens: int
    points_per_code: int  # of 10 ms
    dim: int = 256
    ff: int = 768
    blocks: int = 3  # at the rate of frames, and as many at that of codes
    kernel: int = 7
    reader: int = 384
    behind: int = 2  # codes before and after a code that its reader's first layer sees
    ahead: int = 2


class ContentEncoder(nn.Module):
    """Plans to latent values, one vector per code."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        dim, half = sizes.dim, sizes.points_per_code // 2
        self.phones = nn.Embedding(NUM_SYMBOLS, PHONE_DIM)
        self.input = nn.Linear((PHONE_DIM + PARTS) * half, dim)
        self.frames = _stack(sizes)
        self.join = nn.Linear(2 * dim, dim)
        self.codes = _stack(sizes)
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, len(sizes.levels))
        self.even = Even(len(sizes.levels))

    def forward(self, plan: Plan) -> Tensor:
        """A plan of [B, T * points_per_code] to float32 [B, T, levels]."""
        curves = torch.stack((plan.octaves, plan.voiced, plan.energy), -1)
        x = torch.cat((self.phones(plan.phones), curves), -1)
        x = self.frames(self.input(x.reshape(len(x), -1, self.input.in_features)))
        x = self.join(x.reshape(len(x), -1, self.join.in_features))
        return self.even(self.output(self.norm(self.codes(x))))


def _stack(sizes: Sizes) -> nn.Sequential:
    block = (sizes.dim, sizes.ff, sizes.kernel)
    return nn.Sequential(*(ConvNext(*block, causal=False) for _ in range(sizes.blocks)))


class StyleEncoder(nn.Module):
    """Style vectors to latent values, one vector per voice token."""

    mean: Tensor
    size: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.shape = (sizes.voice_tokens, len(sizes.levels))
        width = sizes.voice_tokens * len(sizes.levels)
        self.register_buffer("mean", torch.zeros(STYLE))
        self.register_buffer("size", torch.ones(STYLE))
        self.output = nn.Linear(STYLE, width)
        self.even = Even(width)

    def forward(self, style: Tensor) -> Tensor:
        """Styles [B, 256] to float32 [B, K, levels]."""
        return self.even(self.output((style - self.mean) / self.size)).view(-1, *self.shape)


class Coder(nn.Module):
    """Both encoders and the quantiser that they share."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.content, self.style = ContentEncoder(sizes), StyleEncoder(sizes)
        self.quantizer = FiniteScalarQuantizer(sizes.levels)

    def codes(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """A plan to quantised values [B, T, levels] and codes [B, T]."""
        values, codes = self.quantizer(self.content(plan))
        return values, codes

    def voice(self, style: Tensor, error: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
        """Styles [B, 256] to quantised values [B, K, levels] and tokens [B, K].

        `error`: deviation of a random error of the latent values, as that of a clip's voice.
        """
        latent = self.style(style)
        latent = latent + error * torch.randn_like(latent)
        values, tokens = self.quantizer(latent)
        return values, tokens


class Reader(nn.Module):
    """Reads plans from the values of codes, and styles from those of voice tokens.

    It sees `ahead` codes after a code and all before it. So what is said at a place is in the codes
    that have come soon after it.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.sizes = sizes.reader, sizes
        seen = sizes.behind + 1 + sizes.ahead
        self.input = nn.Conv1d(len(sizes.levels), FRAMES * width, seen)
        self.blocks = nn.Sequential(
            *(ConvNext(width, 3 * width, sizes.kernel, causal=True) for _ in range(sizes.blocks))
        )
        points = sizes.points_per_code // FRAMES
        self.output = nn.Linear(width, points * (NUM_SYMBOLS + PARTS))
        self.style = nn.Linear(sizes.voice_tokens * len(sizes.levels), STYLE)

    def plan(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [B, T, levels] to logits [B, P, symbols] and octaves, voice, energy [B, P, 3]."""
        seen = F.pad(values, (0, 0, self.sizes.behind, self.sizes.ahead))
        x = self.input(seen.transpose(1, 2)).transpose(1, 2)
        x = self.blocks(x.reshape(len(values), -1, self.sizes.reader))
        read = self.output(x).view(len(values), -1, NUM_SYMBOLS + PARTS)
        return read[..., :NUM_SYMBOLS], read[..., NUM_SYMBOLS:]


class Read(NamedTuple):
    """Losses, the share of points whose phone is right, and that of symbols which are wrong."""

    phone: Tensor
    octaves: Tensor
    voiced: Tensor
    energy: Tensor
    right: Tensor
    wrong: Tensor


def read_losses(logits: Tensor, curves: Tensor, wanted: Plan) -> Read:
    """Losses of reading plans: a symbol counts the same whatever its length, octaves count where
    there is voice."""
    octaves, voiced, energy = curves.unbind(-1)
    spoken = wanted.voiced
    off = ((octaves - wanted.octaves).abs() * spoken).sum() / spoken.sum().clamp_min(1)
    phone, wrong = symbol_losses(logits, wanted.phones)
    return Read(
        phone,
        off,
        F.binary_cross_entropy_with_logits(voiced, spoken),
        (energy - wanted.energy).abs().mean(),
        (logits.detach().argmax(-1) == wanted.phones).float().mean(),
        wrong,
    )


def symbol_losses(logits: Tensor, phones: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of reading phones [B, P] by logits [B, P, symbols], where a symbol counts the
    same whatever its length, and the share of symbols that are read as others."""
    symbol = symbols_of(phones)
    length = torch.zeros_like(symbol).index_add_(0, symbol, torch.ones_like(symbol))
    missed = F.cross_entropy(logits.flatten(0, 1), phones.flatten(), reduction="none")
    loss = (missed / length[symbol]).sum() / (symbol[-1] + 1)
    return loss, wrong_symbols(logits.detach(), phones, symbol)


def symbols_of(phones: Tensor) -> Tensor:
    """Number the runs of equal phones [B, P] through: int64 [B * P]."""
    begins = torch.ones_like(phones, dtype=torch.bool)
    begins[:, 1:] = phones[:, 1:] != phones[:, :-1]
    return begins.flatten().cumsum(0) - 1


def wrong_symbols(logits: Tensor, phones: Tensor, symbol: Tensor) -> Tensor:
    """Return the share of symbols that are read as others, by the sum over their points."""
    chances = logits.flatten(0, 1).softmax(-1)
    summed = torch.zeros_like(chances).index_add_(0, symbol, chances)
    read = summed.argmax(-1)[symbol]  # at each point, that of its symbol
    begins = F.pad(symbol.diff(), (1, 0), value=1)
    return ((read != phones.flatten()) * begins).sum() / (symbol[-1] + 1)


def load_coder(path: Path, sizes: Sizes) -> Coder:
    """A trained coder for use, in float32 of what is stored in float16."""
    coder = Coder(sizes)
    stored = {name: value.float() for name, value in load_file(path).items()}
    own = {k.removeprefix(CODER): v for k, v in stored.items() if k.startswith(CODER)}
    coder.load_state_dict(own)
    return coder.eval().requires_grad_(requires_grad=False)


def points_of(start: Tensor, codes: int, sizes: Sizes) -> Tensor:
    """Middles of the points of so many codes from samples `start` [B] on: [B, P]."""
    count = codes * sizes.points_per_code
    return start[:, None] + torch.arange(count, device=start.device) * POINT + POINT // 2
