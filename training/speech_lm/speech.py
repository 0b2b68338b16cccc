"""Tokenised sessions as flat arrays, from the files of `training.speech_codec.tokenise`.

An utterance is one line in one timbre. A track is a session in one timbre: utterances of one voice,
with rows of voice tokens that were heard in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from training.speech_lm.texts import Texts
from training.speech_lm.vocabulary import FIRST_CODE
from training.strings import flat_index

MAX_HELD_OUT = 512
NO_VOICE = -1


def token_files(folder: Path) -> list[Path]:
    """The finished ones."""
    return [path for path in sorted(folder.glob("tokens_*.npz")) if ".tmp" not in path.name]


class Speech:
    """Every utterance's codes, text and track; every track's rows.

    code_start, code_len, text, track, place: int64 [U]; `place` counts the session's lines.
    codes: int16 tokens. voice: int64 [T], a named voice's number where the track is its own.
    rows: int16 tokens [T, R, K]; covers: int64 [T, R], a bit for each line of the session.
    fixed: for each named voice's number its row, int16 [K].
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
            codes, tracks = codes + part["codes"].size, tracks + 2 * len(part["voice"])
            for session, row in zip(part["named_by"], part["named"], strict=True):
                self.fixed.setdefault(int(part["voice"][session]), _tokens(row))
        if not found:
            raise ValueError("there are no tokens to learn from")
        whole = {name: np.concatenate(values) for name, values in found.items()}
        self.codes, self.voice = whole["codes"], whole["voice"]
        self.code_start, self.code_len = whole["code_start"], whole["code_len"]
        self.text, self.track, self.place = whole["text"], whole["track"], whole["place"]
        self.rows, self.covers = whole["rows"], whole["covers"]
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
        """One file's arrays with its places in the whole: own timbre first, then the partners'."""
        size, session = part["size"].astype(np.int64), part["session"].astype(np.int64)
        start = np.cumsum(size) - size
        first = np.searchsorted(session, np.arange(len(part["voice"])))
        text = texts.first[part["accent"][session]] + part["row"].astype(np.int64)
        rows = len(part["rows"]) // (2 * len(part["voice"]))
        heard = part["heard"].astype(np.int64)
        lines = heard[:, 2:] - first[heard[:, 0], None]
        covers = (2 << lines[:, 1]) - (1 << lines[:, 0])
        voice = np.full((len(part["voice"]), 2), NO_VOICE)
        voice[:, 0] = part["voice"]
        return {
            "codes": _tokens(part["codes"]).ravel(),
            "code_start": codes + np.concatenate((start, start + size.sum())),
            "code_len": np.tile(size, 2),
            "text": np.tile(text, 2),
            "track": tracks + np.concatenate((2 * session, 2 * session + 1)),
            "place": np.tile(np.arange(len(session)) - first[session], 2),
            "voice": voice.ravel(),
            "rows": _tokens(part["rows"]).reshape(-1, rows, part["rows"].shape[1]),
            "covers": covers.reshape(-1, rows),
        }

    @property
    def voice_tokens(self) -> int:
        return self.rows.shape[2]

    def said(self, utterances: np.ndarray) -> np.ndarray:
        """The codes of utterances, one after the other, int16."""
        return self.codes[flat_index(self.code_start[utterances], self.code_len[utterances])]


def _tokens(codes: np.ndarray) -> np.ndarray:
    return (FIRST_CODE + codes.astype(np.int32)).astype(np.int16)
