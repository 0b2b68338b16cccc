"""Examples from takes, what listens to codes, and whole runs at toy size."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.takes import write_take
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


def test_drives_begin_at_the_crops_first_sample(takes: Path) -> None:
    crops = Crops(load_takes(sorted(takes.glob("*.npz")), torch.device("cpu")), TOY, SIZES)
    found = crops.draw(crops.training, torch.Generator().manual_seed(1))
    points = 6 * TOY.hop // TOY.stft_hop + TOY.n_fft // TOY.stft_hop
    assert found.drive.shape == found.turns.shape == (16, points)
    # pitch is a ramp of 1 Hz in 300 samples; the first frame's middle is in the crop's first 300
    ramp = torch.where(found.drive > 0, found.drive, torch.nan)
    start = 300 * found.pitch[:, :1]
    at = start + TOY.stft_hop * torch.arange(points)
    inside = (ramp > 11) & (at < 36_000 - 600)
    assert inside.any(1).sum() > 8
    assert torch.allclose(ramp[inside], at[inside] / 300, atol=0.01)
    # the source's frequency is a pitch value's for 300 samples around its first
    cells = torch.arange(120, dtype=torch.float64)
    middle = (cells.cumsum(0) * 300 / 24_000)[((at - 150) // 300).clamp(0, 118).long()]
    turns = middle + ((at - 150) % 300) / 24_000 * (((at - 150) // 300).clamp(0, 118) + 1)
    off = (found.turns - turns + 0.5) % 1 - 0.5
    assert float(off[inside].abs().max()) < 1e-4


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
        values = torch.randn(16, 6, len(TOY.levels), requires_grad=True)
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


def test_a_design_goes_on_from_another_ones_file(takes: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(DESIGNS, "narrow", replace(TOY, decoder_ff=24))
    out = takes.parent / "codec"
    arguments = [*SMALL, "--takes", str(takes), "--out", str(out)]
    train([*arguments, "--steps", "1", "--alone", "0"])
    start = out / "toy.safetensors"
    before = read(start)
    arguments[arguments.index("toy")] = "narrow"
    train([*arguments, "--steps", "1", "--lr", "0", "--start", str(start)])
    assert "new: ['codec.decoder.blocks.0.ff_in.bias'," in capsys.readouterr().out
    own = out / "narrow.safetensors"
    after = read(own)
    kept = {name for name, value in before.items() if value.shape == after[name].shape}
    assert "codec.decoder.spectra.weight" in kept
    assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in kept)
    train([*arguments, "--steps", "1", "--start", str(own)])
    assert "new: [" not in capsys.readouterr().out  # its own weights are all there


def test_a_trained_codec_has_finite_weights_and_is_heard(takes: Path, capsys) -> None:
    out = takes.parent / "codec"
    train([*SMALL, "--takes", str(takes), "--out", str(out), "--steps", "12", "--alone", "0.2"])
    assert "fooled" in capsys.readouterr().out
    assert not any(value.isnan().any() for value in read(out / "toy.safetensors").values())
    codec = load(out / "toy.8bit.safetensors", out / "toy.json")
    codes = torch.zeros(1, 4, dtype=torch.long)
    samples = codec.decode(codes, torch.zeros(1, TOY.voice_tokens, dtype=torch.long))
    assert float(samples.detach().std()) > 0


def test_frozen_encoders_keep_their_codes_to_the_bit(takes: Path, capsys) -> None:
    out = takes.parent / "codec"
    arguments = [*SMALL, "--takes", str(takes), "--out", str(out)]
    start = out / "toy.safetensors"
    train([*arguments, "--steps", "3"])
    crops = Crops(load_takes(sorted(takes.glob("*.npz")), torch.device("cpu")), TOY, SIZES)
    heard = crops.draw(crops.held_out, torch.Generator().manual_seed(3))
    before, codec = read(start), load(start, start.with_suffix(".json"))
    capsys.readouterr()
    train([*arguments, "--steps", "12", "--frozen-encoders", "--start", str(start)])
    assert "phone" not in capsys.readouterr().out.split("held out")[0]
    after, frozen = read(start), load(start, start.with_suffix(".json"))
    for name in ("encode", "voice"):
        samples = heard.source if name == "encode" else heard.reference
        pairs = zip(getattr(codec, name)(samples), getattr(frozen, name)(samples), strict=True)
        assert all(torch.equal(old, new) for old, new in pairs)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("codec.decoder.") for name in changed)


def test_frozen_encoders_need_weights_to_go_on_from(takes: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        train([*SMALL, "--takes", str(takes), "--out", ".", "--frozen-encoders"])
    assert "name --start" in capsys.readouterr().err


def test_a_trial_takes_a_file_or_a_folder_to_go_on_from(tmp_path: Path, capsys) -> None:
    file = tmp_path / "one.safetensors"
    file.write_bytes(b"")
    assert trial.start_of(file, "toy") == file
    assert trial.start_of(tmp_path, "toy") == tmp_path / "toy.safetensors"
    folders = [
        part for name in ("teacher", "package", "phonemes", "out") for part in (f"--{name}", ".")
    ]
    with pytest.raises(SystemExit):
        trial.main([*folders, "--designs", "source_free", "toy", "--start", str(tmp_path)])
    assert "source_free.safetensors is not there" in capsys.readouterr().err


def test_a_voices_trial_needs_encoders(tmp_path: Path, capsys) -> None:
    folders = [
        part for name in ("teacher", "package", "phonemes", "out") for part in (f"--{name}", ".")
    ]
    with pytest.raises(SystemExit):
        trial.main([*folders, "--voice", "--designs", "toy"])
    assert "--voice needs --start and one design" in capsys.readouterr().err
    assert trial.parts_of(["a", "--", "b", "--", "c", "--"]) == (["a"], ["b"], ["c", "--"])
    assert trial.parts_of(["a"]) == (["a"], [], [])


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
    processes.wait("fi")
    processes.start("wrong", 1, "no_such_module", [])
    with pytest.raises(trial.TrialError, match="no_such_module"):
        processes.wait()
    assert "Zen" in (tmp_path / "logs" / "fine.log").read_text()
    assert sys.executable
