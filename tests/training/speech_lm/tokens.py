"""Tokenised sessions and tables as the stages before leave them, for where no teacher is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import table, write_table
from training.kokoro.style import LENGTHS
from training.speech_lm.vocabulary import Symbols

KNOWN = {symbol: 3 + 2 * place for place, symbol in enumerate(".,! abdefgˈˌəðiz\u201c\u201d")}
VOICE_TOKENS, CODEBOOK = 4, 64
LINES = 6  # of a session
ROWS = 60


def rows(accent: str) -> list[str]:
    """Phonemes, a tab and the text; the second line's words are not side by side."""
    vowel = {"a": "ə", "b": "i"}[accent]
    found = [f"\u201cbˈ{vowel}d {'faz ' * (n % 4)}gˈ{vowel}b.\u201d\t\u201cBed {'fuzz ' * (n % 4)}"
             f"gab{n}.\u201d" for n in range(ROWS)]  # fmt: skip
    found[1] = "ðə bˈad\tThe-bad one"
    return found


def write_tables(folder: Path) -> None:
    """Both accents' tables, the teacher's symbols and voices, as their stages leave them."""
    (folder / SYMBOLS).parent.mkdir(parents=True)
    (folder / SYMBOLS).write_text(json.dumps({"model": {"vocab": {"$": 0} | KNOWN}}))
    (folder / "phonemes").mkdir()
    for accent in "ab":
        write_table(rows(accent), table(folder / "phonemes", accent))
    styles = {name: np.zeros((2, 256), np.float16) for name in ("af_one", "am_two", "bf_one")}
    np.savez(folder / "voices.npz", **styles, **{LENGTHS: np.arange(2)})


def write_tokens(path: Path, sessions: int = 8, seed: int = 0) -> None:
    """Sessions of LINES lines; codes tell the line, its timbre in the lowest bit; every session's
    references are its first line, its last two and all of it. Even sessions have named voices,
    every third is British."""
    rng, order = np.random.default_rng(seed), np.arange(sessions)
    accent = (order % 3 == 2).astype(np.uint8)
    row = rng.integers(0, ROWS, sessions * LINES).astype(np.uint32)
    symbols = Symbols(KNOWN)
    session = np.repeat(order, LINES)
    said = [rows("ab"[accent[s]])[r].split("\t")[0] for s, r in zip(session, row, strict=True)]
    length = np.array([len(symbols.places(line)) + 2 for line in said], np.uint8)
    size = (length + 3).astype(np.uint16)
    own = np.repeat((row * 2 % CODEBOOK).astype(np.uint16), size)
    spans = np.array([(0, 0), (LINES - 2, LINES - 1), (0, LINES - 1)])
    heard = [
        (s, side, s * LINES + first, s * LINES + last)
        for s in order for side in (0, 1) for first, last in spans
    ]  # fmt: skip
    named = np.flatnonzero(order % 2 == 0)
    np.savez_compressed(
        path,
        codes=np.stack((own, own | 1)),
        size=size,
        session=session.astype(np.uint16),
        row=row,
        symbols=length,
        durations=np.ones(int(length.sum()), np.uint8),
        voice=np.where(order % 2, -1, order // 2 % 3).astype(np.int16),
        accent=accent,
        partner=((order + 1) % sessions).astype(np.uint16),
        style=order.astype(np.uint32),
        rows=np.arange(len(heard))[:, None].repeat(VOICE_TOKENS, 1).astype(np.uint16) % CODEBOOK,
        heard=np.array(heard, np.uint16),
        named=(named[:, None] + [0, 1, 2, 3]).astype(np.uint16),
        named_by=named.astype(np.uint16),
    )
