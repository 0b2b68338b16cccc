"""Examples from takes, what listens to codes, and whole runs at toy size."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from training.speech_codec import trial
from training.speech_codec.checkpoint import load, read
from training.speech_codec.config import DESIGNS
from training.speech_codec.crops import GRID, HELD_OUT, Crops, Sizes, load_takes
from training.speech_codec.listener import Listener
from training.speech_codec.train import main as train

TOY = DESIGNS["toy"]
SIZES = Sizes(batch=16, crop=6, reference=8)
SMALL = ["--design", "toy", "--minutes", "20", "--batch", "2", "--crop", "8", "--reference", "8"]
SMALL += ["--judged", "3", "--judge-width", "2", "--log", "0"]


def write_take(path: Path, sessions: int = HELD_OUT + 3, seconds: float = 1.5) -> None:
    """Sessions whose samples say whose timbre they are: session number, negative in `other`; a
    sample's place modulo 600 is added, so that alignment shows."""
    length = int(seconds * 24_000) // GRID * GRID
    order = np.arange(sessions)
    partner = (order + 1) % sessions
    place = np.arange(length) % GRID
    own = (order[:, None] * 600 + place).astype(np.int16)
    other = -own
    np.savez(
        path,
        own=own.ravel(),
        other=other.ravel(),
        phones=np.tile(np.arange(length // GRID) % 5, sessions).astype(np.uint8),
        pitch=np.tile(np.arange(length // 300) * 1.0, sessions).astype(np.float16),
        start=order * length,
        end=(order + 1) * length,
        partner=partner,
        style=np.repeat(order[:, None], 256, 1).astype(np.float16),
        lines=np.stack((order, order * length), 1),
    )


@pytest.fixture
def takes(tmp_path: Path) -> Path:
    folder = tmp_path / "takes"
    folder.mkdir()
    write_take(folder / "take_0_0000.npz")
    return folder


def test_examples_are_aligned_and_their_reference_has_the_targets_timbre(takes: Path) -> None:
    crops = Crops(load_takes(sorted(takes.glob("*.npz")), torch.device("cpu")), TOY, SIZES)
    assert set(crops.held_out.tolist()) == {0, HELD_OUT}
    found = crops.draw(crops.training, torch.Generator().manual_seed(0))
    assert found.source.shape == found.target.shape == (16, 6 * TOY.hop)
    assert found.reference.shape == (16, 8 * TOY.hop)
    assert found.phones.shape == found.pitch.shape == (16, 12)
    assert 0 < int(found.crosses.sum()) < 16
    source, target, reference = (x * 32768 for x in (found.source, found.target, found.reference))
    assert torch.equal(source.abs(), target.abs())  # the same session and place
    assert torch.equal((source.sign() != target.sign()).any(1), found.crosses)
    session = (target.abs()[:, 0] / 600).floor()
    owner = torch.where(target[:, 1] < 0, (session + 1) % (HELD_OUT + 3), session)
    assert torch.equal((reference[:, 0] / 600).floor(), owner)
    assert torch.equal(found.style[:, 0], owner)


def test_labels_are_those_of_the_frames_middles(takes: Path) -> None:
    crops = Crops(load_takes(sorted(takes.glob("*.npz")), torch.device("cpu")), TOY, SIZES)
    found = crops.draw(crops.training, torch.Generator().manual_seed(1))
    # pitch is a ramp of 300 samples from the session's start, and phones count its 600s
    first = (found.pitch[:, 0] * 300).long() // GRID
    for frame in range(12):
        middle = int((frame + 0.5) * TOY.frame)
        assert torch.equal(
            found.pitch[:, frame].long() - 2 * first, torch.full((16,), middle // 300)
        )
        assert torch.equal(found.phones[:, frame], (first + middle // GRID) % 5)


def test_sessions_that_are_too_short_are_an_error(takes: Path) -> None:
    held = load_takes(sorted(takes.glob("*.npz")), torch.device("cpu"))
    with pytest.raises(ValueError, match="no session"):
        Crops(held, TOY, Sizes(2, 6, 1000))


def test_the_listener_asks_codes_for_phones_and_voices_for_styles(takes: Path) -> None:
    crops = Crops(load_takes(sorted(takes.glob("*.npz")), torch.device("cpu")), TOY, SIZES)
    found = crops.draw(crops.training, torch.Generator().manual_seed(2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        listener = Listener(TOY, *crops.style_size())
        values = torch.randn(16, 6, TOY.values, requires_grad=True)
        voice = torch.randn(16, TOY.voice_tokens, len(TOY.levels), requires_grad=True)
    heard = listener(values, voice, found)
    (codes,) = torch.autograd.grad(heard.phone + heard.pitch, values, retain_graph=True)
    (tokens,) = torch.autograd.grad(heard.style, voice)
    assert codes.abs().amax((1, 2)).min() > 0
    assert tokens.abs().amax((1, 2)).min() > 0
    assert 0 <= float(heard.right) <= 1


def test_a_run_leaves_weights_that_another_goes_on_from(takes: Path, capsys) -> None:
    out = takes.parent / "codec"
    arguments = [*SMALL, "--takes", str(takes), "--out", str(out), "--steps", "11"]
    train([*arguments, "--alone", "0.5"])
    printed = capsys.readouterr().out
    assert "held out:" in printed
    assert "fooled" in printed.splitlines()[-3]
    half, small = (out / name for name in ("toy.safetensors", "toy.8bit.safetensors"))
    assert load(small, out / "toy.json").config == load(half, out / "toy.json").config == TOY
    before = read(half)
    train([*arguments[:-1], "1", "--alone", "0", "--lr", "0", "--start", str(half)])
    after = read(half)
    assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in before)


def test_a_trial_that_fails_says_why(tmp_path: Path, capsys) -> None:
    folders = [tmp_path / name for name in ("teacher", "package", "phonemes", "out")]
    flags = ["--teacher", "--package", "--phonemes", "--out"]
    given = [str(part) for pair in zip(flags, folders, strict=True) for part in pair]
    assert trial.main([*given, "--designs", "toy", "--studios", "1"]) == 1
    assert "studio0 failed" in capsys.readouterr().out
    assert (tmp_path / "out" / "status").read_text() == "failed\n"
    assert "FileNotFoundError" in (tmp_path / "out" / "logs" / "studio0.log").read_text()


def test_processes_run_beside_each_other_and_all_are_waited_for(tmp_path: Path) -> None:
    processes = trial.Processes(tmp_path)
    processes.start("fine", 0, "this", [])
    processes.start("wrong", 1, "no_such_module", [])
    with pytest.raises(trial.TrialError, match="no_such_module"):
        processes.wait()
    assert "Zen" in (tmp_path / "logs" / "fine.log").read_text()
    assert sys.executable
