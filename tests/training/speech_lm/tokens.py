"""Tokenised sessions and tables as the stages before leave them, for where no teacher is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import table, write_table
from training.kokoro.style import LENGTHS
from training.speech_lm.vocabulary import Symbols

KNOWN = {symbol: 3 + 2 * place for place, symbol in enumerate(".,! abdefgˈˌəðizo\u201c\u201d")}
VOICE_TOKENS, CODEBOOK = 4, 64
LINES = 6  # of a session
VOICE_ROWS = 3
ROWS = 60


def rows(accent: str) -> list[str]:
    """Phonemes, a tab and the text; the second line's words are not side by side."""
    vowel = {"a": "ə", "b": "i", "e": "o"}[accent]
    found = [f"\u201cbˈ{vowel}d {'faz ' * (n % 4)}gˈ{vowel}b.\u201d\t\u201cBed {'fuzz ' * (n % 4)}"
             f"gab{n}.\u201d" for n in range(ROWS)]  # fmt: skip
    found[1] = "ðə bˈad\tThe-bad one"
    return [row.replace("Bed", "¡Báñó") for row in found] if accent == "e" else found


def write_tables(folder: Path, accents: str = "ab") -> None:
    """The accents' tables, the teacher's symbols and voices, as their stages leave them."""
    (folder / SYMBOLS).parent.mkdir(parents=True)
    (folder / SYMBOLS).write_text(json.dumps({"model": {"vocab": {"$": 0} | KNOWN}}))
    (folder / "phonemes").mkdir()
    for accent in accents:
        write_table(rows(accent), table(folder / "phonemes", accent))
    styles = {name: np.zeros((2, 256), np.float16) for name in ("af_one", "am_two", "bf_one")}
    np.savez(folder / "voices.npz", **styles, **{LENGTHS: np.arange(2)})


def write_tokens(path: Path, sessions: int = 8, seed: int = 0, third: int = 1) -> None:
    """Write sessions of LINES lines: codes say the line, voice tokens the session and the row. Even
    sessions have named voices, every third is of the accent `third`: British."""
    rng, order = np.random.default_rng(seed), np.arange(sessions)
    accent = np.where(order % 3 == 2, third, 0).astype(np.uint8)
    row = rng.integers(0, ROWS, sessions * LINES).astype(np.uint32)
    symbols = Symbols(KNOWN)
    session = np.repeat(order, LINES)
    said = [rows("abe"[accent[s]])[r].split("\t")[0] for s, r in zip(session, row, strict=True)]
    length = np.array([len(symbols.places(line)) + 2 for line in said], np.uint8)
    size = (length + 3).astype(np.uint16)
    own = order[:, None, None] * 2 + np.arange(VOICE_TOKENS)
    errors = np.arange(VOICE_ROWS)[:, None] * 16
    np.savez_compressed(
        path,
        allow_pickle=False,
        codes=np.repeat((row % CODEBOOK).astype(np.uint16), size),
        size=size,
        session=session.astype(np.uint16),
        row=row,
        symbols=length,
        voiced=size - 2,
        rise=np.where(row % 4 == 1, 2.0, -1.0).astype(np.float16),
        durations=np.ones(int(length.sum()), np.uint8),
        voice=np.where(order % 2, -1, order // 2 % 3).astype(np.int16),
        accent=accent,
        rows=((own + errors) % CODEBOOK).astype(np.uint16),
    )
