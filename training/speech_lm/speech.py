"""Tokenised sessions as flat arrays, from the files of `training.speech_codec.tokenise`.

An utterance is one line. A track is a session: utterances of one voice, with rows of its voice
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from training.rises import RISES
from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import FIRST_CODE
from training.strings import Strings, flat_index

MAX_HELD_OUT = 1024
BEFORE, AFTER = 10, 2  # codes next to where a voice ends: 300 ms and 50 ms are compared there


def token_files(folder: Path) -> list[Path]:
    """The finished ones."""
    return [path for path in sorted(folder.glob("tokens_*.npz")) if ".tmp" not in path.name]


class Speech:
    """Every utterance's codes, text and track; every track's rows.

    code_start, code_len, text, track: int64 [U]. codes: int16 tokens. durations: of each
    utterance's symbols, in the teacher's frames. rise: float16 [U] semitones at its end, NaN
    without voice. ending: bool [C], codes that say how the pitch of a question ends. weight:
    float32 [C], how much a code counts in the loss.
    voice: int64 [T], a named voice's number, or -1. rows: int16 tokens [T, R, K]; the first is the
    voice's own, the others have errors. fixed: each named voice's own row by its number, int16 [K].
    Raises ValueError where the texts are not those that were spoken.
    """

    def __init__(
        self, paths: Sequence[Path], texts: Texts, fixed: Mapping[int, np.ndarray] | None = None
    ) -> None:
        self.fixed = dict(fixed or {})
        found: dict[str, list[np.ndarray]] = {}
        codes = tracks = 0
        for path in paths:
            with np.load(path) as stored:
                part = dict(stored)
            self._check(part, texts, path)
            for name, value in self._flat(part, texts, codes, tracks).items():
                found.setdefault(name, []).append(value)
            codes, tracks = codes + part["codes"].size, tracks + len(part["voice"])
            for session in np.flatnonzero(part["voice"] >= 0):
                row = _tokens(part["rows"][session, 0])
                self.fixed.setdefault(int(part["voice"][session]), row)
        if not found:
            raise ValueError("there are no tokens to learn from")
        whole = {name: np.concatenate(values) for name, values in found.items()}
        self.codes, self.voice = whole["codes"], whole["voice"]
        self.code_start, self.code_len = whole["code_start"], whole["code_len"]
        self.text, self.track, self.rows = whole["text"], whole["track"], whole["rows"]
        self.rise = whole["rise"]
        self.asks = texts.asks[self.text]
        self._voiced = whole["voiced"]
        self.ending = np.zeros(len(self.codes), bool)
        self.ending[self._ends_of(np.flatnonzero(self.asks))] = True
        self.weight = np.ones(len(self.codes), np.float32)
        symbols = whole["symbols"]
        self.durations = Strings.of(whole["durations"], np.cumsum(symbols) - symbols, symbols)
        held_out = texts.held_out[self.text]
        self.train = np.flatnonzero(~held_out)
        self.held_out = np.flatnonzero(held_out)[:MAX_HELD_OUT]

    @staticmethod
    def _check(part: dict[str, np.ndarray], texts: Texts, path: Path) -> None:
        row = texts.first[part["accent"][part["session"]]] + part["row"]
        inside = row < len(texts.spelled)
        known = texts.spelled.length[np.where(inside, row, 0)] + 2
        if not (inside & (known == part["symbols"])).all():
            raise ValueError(f"{path}: the tables of phonemes are not those that were spoken")

    @staticmethod
    def _flat(
        part: dict[str, np.ndarray], texts: Texts, codes: int, tracks: int
    ) -> dict[str, np.ndarray]:
        """One file's arrays with its places in the whole."""
        size, session = part["size"].astype(np.int64), part["session"].astype(np.int64)
        return {
            "codes": _tokens(part["codes"]),
            "code_start": codes + np.cumsum(size) - size,
            "code_len": size,
            "text": texts.first[part["accent"][session]] + part["row"].astype(np.int64),
            "track": tracks + session,
            "symbols": part["symbols"].astype(np.int64),
            "durations": part["durations"],
            "voiced": part["voiced"].astype(np.int64),
            "rise": part["rise"],
            "voice": part["voice"].astype(np.int64),
            "rows": _tokens(part["rows"]),
        }

    def _ends_of(self, utterances: np.ndarray) -> np.ndarray:
        """Places of their codes about where the voice ends."""
        voiced, size = self._voiced[utterances], self.code_len[utterances]
        first = np.maximum(voiced - BEFORE, 0)
        last = np.where(voiced > 0, np.minimum(voiced + AFTER, size), first)
        return flat_index(self.code_start[utterances] + first, last - first)

    def weigh_ends(self, ends: float, rising: float) -> None:
        """Let codes at the ends of questions count `ends` times, and `rising` times as much again
        where the teacher's pitch rises."""
        self.weight[self.ending] = ends
        rises = self.asks & (self.rise.astype(np.float32) >= RISES)
        self.weight[self._ends_of(np.flatnonzero(rises))] = ends * rising

    @property
    def voice_tokens(self) -> int:
        return self.rows.shape[2]

    def places(self, utterances: np.ndarray) -> np.ndarray:
        """Places of the codes of utterances, one after the other."""
        return flat_index(self.code_start[utterances], self.code_len[utterances])

    def said(self, utterances: np.ndarray) -> np.ndarray:
        """The codes of utterances, one after the other, int16."""
        return self.codes[self.places(utterances)]


def _tokens(codes: np.ndarray) -> np.ndarray:
    return (FIRST_CODE + codes.astype(np.int32)).astype(np.int16)
