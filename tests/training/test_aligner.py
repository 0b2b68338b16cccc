"""The aligner, trained at toy size on tokens of plans, in the service's own network."""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.speech_lm.tokens import KNOWN
from tests.training.takes import TOY, toy_coder
from training import aligner
from training.kokoro.packages import SYMBOLS
from training.kokoro.phonemes import ids_of, table, write_table
from training.labels import letter_labels
from training.speech_codec.coder import STYLE
from training.speech_codec.config import save_config
from training.speech_codec.plans import CURVE_GRID, PHONE_GRID
from training.speech_codec.tokenise import tokens, write
from training.speech_lm.speech import Speech, token_files
from training.speech_lm.texts import HELD_OUT_LINE, Texts
from training.speech_lm.vocabulary import Symbols
from tts.speech.aligner import Aligner, LetterStream

LETTERS = "abdi"  # each is its own phoneme
ROWS, SESSIONS, LINES = 40, 6, 10


def lines() -> list[str]:
    """Return texts of words of one letter each, which are their own phonemes; two are held out."""
    rng, found = random.Random(0), []
    held_out = 2
    while len(found) < ROWS:
        words = (rng.choice(LETTERS) * rng.randint(2, 5) for _ in range(rng.randint(3, 7)))
        line = " ".join(words) + "."
        if zlib.crc32(line.encode()) % HELD_OUT_LINE == 0 or len(found) < ROWS - held_out:
            found.append(line)
    return [*found, "ba bad"]


def plan(texts: list[str], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return a plan of lines drawn from the texts, all of them at least once."""
    count = SESSIONS * LINES
    row = np.arange(count) % len(texts)
    ids = [np.array([0, *ids_of(texts[r], KNOWN), 0], np.uint8) for r in row]
    durations = [rng.integers(3, 7, len(line)).astype(np.uint8) for line in ids]
    frames = np.array([line.sum() for line in durations], np.int64)
    first = (np.cumsum(frames) - frames) * PHONE_GRID
    curve = int(frames.sum()) * PHONE_GRID // CURVE_GRID
    return {
        "phones": np.concatenate([np.repeat(*line) for line in zip(ids, durations, strict=True)]),
        "pitch": np.zeros(curve, np.float16),
        "energy": np.zeros(curve, np.float16),
        "style": np.zeros((SESSIONS, STYLE), np.float16),
        "lines": np.stack((np.arange(count) // LINES, first), 1),
        "row": row.astype(np.int32),
        "symbols": np.array([len(line) for line in ids], np.int32),
        "durations": np.concatenate(durations),
        "voice": np.full(SESSIONS, -1, np.int16),
        "accent": np.zeros(SESSIONS, np.uint8),
    }


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Tokens and tables as the stages before leave them; the last row has too few words."""
    names = ("tokens", "phonemes", "package", "config", "out")
    found = {name: tmp_path / name for name in names}
    texts = lines()
    for name in ("tokens", "phonemes"):
        found[name].mkdir()
    (found["package"] / SYMBOLS).parent.mkdir(parents=True)
    (found["package"] / SYMBOLS).write_text(json.dumps({"model": {"vocab": {"$": 0} | KNOWN}}))
    rows = [f"{line}\t{line}" for line in texts[:-1]] + [f"{texts[-1]}\t{'ba-bad'}"]
    for accent in "ab":
        write_table(rows, table(found["phonemes"], accent))
    save_config(TOY, found["config"])
    made = tokens(plan(texts, np.random.default_rng(0)), toy_coder(), torch.device("cpu"))
    write(made, found["tokens"] / "tokens_0_0000.npz")
    return found


def train(places: dict[str, Path], *more: str) -> None:
    flags = [part for name, path in places.items() for part in (f"--{name}", str(path))]
    aligner.main([*flags, "--minutes", "20", "--batch", "4", "--lr", "1e-2", *more])


def test_letters_of_lines_that_were_held_out_are_found(places: dict[str, Path], capsys) -> None:
    train(places, "--steps", "60")
    printed = capsys.readouterr().out
    assert "57 of 58 lines, and 2 of 2 held out" in printed
    found = re.search(r"end of a word ([\d.]+) ms, .* words without times 0, .* 60 steps", printed)
    assert found is not None
    assert float(found[1]) < 20  # half a code
    texts = Texts.load(places["phonemes"], Symbols(KNOWN))
    speech = Speech(token_files(places["tokens"]), texts)
    loaded = Aligner.load(places["out"])
    for line in aligner.timed_lines(speech, texts, speech.held_out):
        letters = letter_labels(line.words, 4 * len(line.codes), 100.0)
        guesses = LetterStream(loaded).push(line.codes, is_last=True).argmax(-1)
        chance = np.bincount(letters).max() / len(letters)
        assert np.mean(guesses == letters) > 0.85 > chance


def test_lines_without_known_times_teach_nothing(places: dict[str, Path]) -> None:
    for accent in "ab":
        rows = [f"{line}\t{line.replace(' ', '-')}" for line in lines()]
        write_table(rows, table(places["phonemes"], accent))
    with pytest.raises(ValueError, match="too few lines whose words have known times"):
        train(places, "--steps", "1")
