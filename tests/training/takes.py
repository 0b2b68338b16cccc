"""Takes as the studio writes them, for where the teacher is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.speech_codec.crops import GRID, HELD_OUT

SYMBOLS = 5  # of a line, with the one before and the one after it


def write_take(
    path: Path, sessions: int = HELD_OUT + 3, seconds: float = 1.5, lines: int = 1, rows: int = 9
) -> None:
    """Sessions whose samples say whose timbre they are: session number, negative in `other`; a
    sample's place modulo 600 is added, so that alignment shows. Even sessions have named voices,
    lines have `seconds` each and rows of a table of `rows`."""
    line = int(seconds * 24_000) // GRID * GRID
    length, order = line * lines, np.arange(sessions)
    place = np.arange(length) % GRID
    own = (order[:, None] * 600 + place).astype(np.int16)
    frames = line // GRID
    durations = np.full((sessions * lines, SYMBOLS), frames // SYMBOLS, np.uint8)
    durations[:, 0] += frames % SYMBOLS
    count = sessions * lines
    np.savez(
        path,
        own=own.ravel(),
        other=-own.ravel(),
        phones=np.tile(np.arange(length // GRID) % 5, sessions).astype(np.uint8),
        pitch=np.tile(np.arange(length // 300) * 1.0, sessions).astype(np.float16),
        start=order * length,
        end=(order + 1) * length,
        partner=(order + 1) % sessions,
        style=np.repeat(order[:, None], 256, 1).astype(np.float16),
        lines=np.stack((np.arange(count) // lines, np.arange(count) * line), 1),
        row=(np.arange(count) % rows).astype(np.int32),
        symbols=np.full(count, SYMBOLS, np.int32),
        durations=durations.ravel(),
        voice=np.where(order % 2, -1, order % 3).astype(np.int16),
        accent=np.zeros(sessions, np.uint8),
    )
