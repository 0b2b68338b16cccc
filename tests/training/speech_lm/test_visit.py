"""A whole visit at toy size: tokens of the takes, then decoder and language model side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.training.speech_lm.tokens import write_tables
from tests.training.takes import SYMBOLS, write_take
from training.kokoro.phonemes import table, write_table
from training.speech_codec import trial
from training.speech_codec.train import main as train_codec

DESIGN = "toy"
SIZES = ["--batch", "2", "--crop", "8", "--reference", "8", "--judged", "3", "--judge-width", "2"]
MODEL = ["--layers", "1", "--dim", "128", "--tokens-per-step", "1024", "--no-compile"]


@pytest.fixture
def visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments; the teacher, who is not installed here, has spoken already."""
    monkeypatch.setattr(trial, "synthesis", lambda args, gpus: iter(()))
    write_tables(tmp_path)
    for accent in "ab":
        rows = [f"{'abd'[n % 3] * (SYMBOLS - 2)}\tWord {n}." for n in range(9)]
        write_table(rows, table(tmp_path / "phonemes", accent))
    takes = tmp_path / "out" / "takes"
    takes.mkdir(parents=True)
    write_take(takes / "take_0_0000.npz", lines=2)
    start = tmp_path / "start" / f"{DESIGN}.safetensors"
    folders = ["--takes", str(takes), "--out", str(start.parent), "--minutes", "20"]
    train_codec(["--design", DESIGN, *folders, *SIZES, "--steps", "1"])
    given = [part for name in ("teacher", "package") for part in (f"--{name}", str(tmp_path))]
    given += ["--phonemes", str(tmp_path / "phonemes"), "--out", str(tmp_path / "out")]
    return [*given, "--voice", "--designs", DESIGN, "--start", str(start)]


def test_a_visit_leaves_tokens_a_decoder_and_a_language_model(
    visit: list[str], tmp_path: Path, capsys
) -> None:
    rest = ["--", *SIZES, "--steps", "12", "--", *MODEL, "--steps", "3"]
    assert trial.main([*visit, *rest]) == 0, capsys.readouterr().out
    out = tmp_path / "out"
    assert (out / "status").read_text() == "done\n"
    with np.load(out / "tokens" / "tokens_0_0000.npz") as tokens:
        assert tokens["codes"].shape[0] == 2
    before = load_file(tmp_path / "start" / f"{DESIGN}.safetensors")
    after = load_file(out / "codec" / f"{DESIGN}.safetensors")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed
    assert all(name.startswith("codec.decoder.") for name in changed)
    assert {"lm.safetensors", "lm.json", "voices.json"} <= {p.name for p in (out / "lm").iterdir()}
    assert "done after 3 steps" in (out / "logs" / "lm.log").read_text()


def test_a_visit_without_takes_ends(visit: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "out" / "takes" / "take_0_0000.npz").unlink()
    assert trial.main([*visit, "--", *SIZES, "--", *MODEL]) == 1
    assert "no tokens to learn from" in capsys.readouterr().out
    assert (tmp_path / "out" / "status").read_text() == "failed\n"
