"""Takes and plans as the studio writes them, and a coder, for where no teacher is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from training.kokoro.style import LENGTHS
from training.kokoro.text import NUM_SYMBOLS
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.coder import CODER, STYLE, Coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.crops import HELD_OUT
from training.speech_codec.plans import CURVE_GRID, PHONE_GRID, Plan

SYMBOLS = 5  # of a line, with the one before and the one after it
TOY = DESIGNS["toy"]
VOICES = tuple(f"{accent}{sex}_{n}" for accent in "ab" for sex in "fm" for n in range(3))


def take_of(
    sessions: int = HELD_OUT + 3, seconds: float = 1.5, lines: int = 1, rows: int = 9
) -> dict[str, np.ndarray]:
    """Sessions whose samples say whose timbre they are: session number, negative in `other`; a
    sample's place modulo 600 is added, so that alignment shows. Pitch counts its places from a
    session's start. Even sessions have named voices, lines have `seconds` each and rows of a table
    of `rows`."""
    line = int(seconds * 24_000) // PHONE_GRID * PHONE_GRID
    length, order = line * lines, np.arange(sessions)
    place = np.arange(length) % PHONE_GRID
    own = (order[:, None] * 600 + place).astype(np.int16)
    frames, count = line // PHONE_GRID, sessions * lines
    durations = np.full((count, SYMBOLS), frames // SYMBOLS, np.uint8)
    durations[:, 0] += frames % SYMBOLS
    curve = np.arange(length // CURVE_GRID)
    return {
        "own": own.ravel(),
        "other": -own.ravel(),
        "phones": np.tile(np.arange(length // PHONE_GRID) // 3 % 5, sessions).astype(np.uint8),
        "pitch": np.tile(curve * 1.0, sessions).astype(np.float16),
        "energy": np.tile(curve % 17 - 5.0, sessions).astype(np.float16),
        "start": order * length,
        "end": (order + 1) * length,
        "partner": (order + 1) % sessions,
        "style": np.repeat(order[:, None], STYLE, 1).astype(np.float16),
        "lines": np.stack((np.arange(count) // lines, np.arange(count) * line), 1),
        "row": (np.arange(count) % rows).astype(np.int32),
        "symbols": np.full(count, SYMBOLS, np.int32),
        "durations": durations.ravel(),
        "voice": np.where(order % 2, -1, order % 3).astype(np.int16),
        "accent": np.zeros(sessions, np.uint8),
    }


def write_take(path: Path, take: dict[str, np.ndarray] | None = None) -> None:
    """Write a take, or one without samples where the file's name begins with `plan`."""
    found = take_of() if take is None else take
    silent = path.name.startswith("plan")
    kept = {k: v for k, v in found.items() if not silent or k not in ("own", "other")}
    np.savez(path, allow_pickle=False, **kept)


def write_voices(path: Path) -> None:
    """Write style rows of enough voices for mixtures, each other than the others."""
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(0, 0.3, (2, STYLE)).astype(np.float16) for name in VOICES}
    np.savez(path, allow_pickle=False, **rows, **{LENGTHS: np.array([0, 200])})


def toy_coder() -> Coder:
    """Return an untrained coder, but for the mean and size of its values: its codes differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        coder = Coder(coder_sizes(TOY))
        for network in coder.modules():
            if isinstance(network, nn.BatchNorm1d):
                network.momentum = 1.0
        points = 8, 40 * TOY.spectra_per_code
        voiced = (torch.rand(points) < 0.5).float()
        phones = torch.randint(NUM_SYMBOLS, points)
        coder.codes(Plan(phones, torch.randn(points) * voiced, voiced, torch.randn(points)))
        coder.voice(torch.randn(64, STYLE))
    return coder.eval().requires_grad_(requires_grad=False)


def write_coder(path: Path, coder: Coder) -> None:
    """Write a coder as its training leaves it."""
    write(halved({f"{CODER}{name}": v for name, v in coder.state_dict().items()}), path)
