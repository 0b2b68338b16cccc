"""Examples from takes, and whole runs of the decoder's training at toy size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.training.takes import TOY, take_of, toy_coder, write_coder, write_take
from training.speech_codec.checkpoint import load, read
from training.speech_codec.coder import Coder
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.crops import HELD_OUT, Crops, Examples, Sizes, load_takes
from training.speech_codec.plans import PHONE_GRID, Plan
from training.speech_codec.tokenise import codes_of_lines
from training.speech_codec.train import Trainer, build_parser
from training.speech_codec.train import main as train

SIZES = Sizes(batch=16, crop=6)
SMALL = ["--design", "toy", "--minutes", "20", "--batch", "2", "--crop", "8"]
SMALL += ["--judged", "3", "--judge-width", "2", "--log", "0"]
SESSIONS, LINE = HELD_OUT + 3, 36_000
SMALL_CODER = coder_sizes(TOY)


@pytest.fixture
def takes(tmp_path: Path) -> Path:
    folder = tmp_path / "takes"
    folder.mkdir()
    write_take(folder / "take_0_0000.npz")
    write_coder(tmp_path / "coder.safetensors", toy_coder())
    return folder


@pytest.fixture
def coder() -> Coder:
    return toy_coder()


def flags(takes: Path) -> list[str]:
    places = {"takes": takes, "coder": takes.parent / "coder.safetensors", "out": out_of(takes)}
    return [*SMALL, *(f"--{name}={place}" for name, place in places.items())]


def out_of(takes: Path) -> Path:
    return takes.parent / "codec"


def crops_of(folder: Path, coder: Coder, sizes: Sizes = SIZES) -> Crops:
    takes = load_takes(sorted(folder.glob("*.npz")), torch.device("cpu"))
    return Crops(takes, coder, TOY, sizes)


def starts_of(found: Examples) -> torch.Tensor:
    """Every crop's first sample in its session, from the drive: pitch is a ramp of 1 Hz in 300
    samples from the session's start, and too low for a voice below 10 Hz."""
    at = TOY.stft_hop * torch.arange(found.drive.shape[1])
    first = (found.drive > 0).int().argmax(1)
    starts = 300 * found.drive.gather(1, first[:, None])[:, 0] - at[first]
    return (starts / TOY.stft_hop).round().long() * TOY.stft_hop


def test_examples_are_aligned_and_crossed_ones_have_the_partners_timbre(
    takes: Path, coder: Coder
) -> None:
    write_take(takes / "take_0_0000.npz", take_of(lines=2))
    crops = crops_of(takes, coder)
    assert crops.held_out.tolist() == [0, 1, 2 * HELD_OUT, 2 * HELD_OUT + 1]
    found = crops.draw(crops.training, torch.Generator().manual_seed(0))
    assert found.target.shape == (16, 6 * TOY.hop)
    assert found.codes.shape == (16, 6)
    assert 0 < int(found.crosses.sum()) < 16
    samples = found.target * 32768
    assert torch.equal((samples < 0).any(1), found.crosses)
    session = (samples.abs()[:, 0] / 600).floor().long()
    owner = torch.where(found.crosses, (session + 1) % SESSIONS, session)
    assert torch.equal(found.style[:, 0].long(), owner)
    start = starts_of(found)
    place = (start[:, None] + torch.arange(6 * TOY.hop)) % PHONE_GRID
    assert torch.equal(samples.abs().long(), session[:, None] * 600 + place)
    codes, at = codes_of_lines(coder, crops.takes, crops.takes["first"])
    line = 2 * session + start // LINE
    assert ((start % LINE) % TOY.hop == 0).all()
    first = at[line] + start % LINE // TOY.hop
    assert torch.equal(found.codes, codes[first[:, None] + torch.arange(6)])
    assert len(found.codes.unique()) > 5


def test_drives_begin_at_the_crops_first_sample(takes: Path, coder: Coder) -> None:
    crops = crops_of(takes, coder)
    found = crops.draw(crops.training, torch.Generator().manual_seed(1))
    points = 6 * TOY.hop // TOY.stft_hop + TOY.n_fft // TOY.stft_hop
    assert found.drive.shape == found.turns.shape == (16, points)
    ramp = torch.where(found.drive > 0, found.drive, torch.nan)
    at = starts_of(found)[:, None] + TOY.stft_hop * torch.arange(points)
    inside = (ramp > 11) & (at < 36_000 - 600)
    assert inside.any(1).sum() > 8
    assert torch.allclose(ramp[inside], at[inside] / 300, atol=0.01)
    # the source's frequency is a pitch value's for 300 samples around its first
    cells = torch.arange(120, dtype=torch.float64)
    middle = (cells.cumsum(0) * 300 / 24_000)[((at - 150) // 300).clamp(0, 118).long()]
    turns = middle + ((at - 150) % 300) / 24_000 * (((at - 150) // 300).clamp(0, 118) + 1)
    off = (found.turns - turns + 0.5) % 1 - 0.5
    assert float(off[inside].abs().max()) < 1e-4


def test_lines_that_are_too_short_are_an_error(takes: Path, coder: Coder) -> None:
    with pytest.raises(ValueError, match=f"no line of {SESSIONS} has 1000 codes"):
        crops_of(takes, coder, Sizes(2, 1000))


def test_a_run_leaves_weights_that_another_goes_on_from(takes: Path, capsys) -> None:
    arguments, out = [*flags(takes), "--steps", "11"], out_of(takes)
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


def test_a_decoder_goes_on_without_what_codes_farther_ahead_say(
    takes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DESIGNS, "farther", replace(TOY, ahead=TOY.ahead + 3))
    monkeypatch.setattr("training.speech_codec.train.coder_sizes", lambda design: SMALL_CODER)
    arguments, out = flags(takes), out_of(takes)
    train([*arguments, "--steps", "1", "--alone", "1"])
    arguments[arguments.index("toy")] = "farther"
    arguments[arguments.index("8")] = "12"  # codes of a crop, whose edges are left out
    start = out / "toy.safetensors"
    train([*arguments, "--steps", "1", "--alone", "1", "--lr", "0", f"--start={start}"])
    before, after = (load(out / f"{name}.safetensors", out / f"{name}.json").decoder
                     for name in ("toy", "farther"))  # fmt: skip
    values, voice = torch.randn(1, 9, 3), torch.randn(1, TOY.voice_tokens, 3)
    with torch.inference_mode():
        assert torch.allclose(before(values, voice), after(values, voice), atol=1e-3)


def test_a_design_goes_on_from_another_ones_file(takes: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(DESIGNS, "narrow", replace(TOY, decoder_ff=24))
    monkeypatch.setattr("training.speech_codec.train.coder_sizes", lambda design: SMALL_CODER)
    arguments, out = flags(takes), out_of(takes)
    train([*arguments, "--steps", "1", "--alone", "0"])
    start = out / "toy.safetensors"
    before = read(start)
    arguments[arguments.index("toy")] = "narrow"
    train([*arguments, "--steps", "1", "--lr", "0", "--start", str(start)])
    assert "new: ['blocks.0.ff_in.bias'," in capsys.readouterr().out
    own = out / "narrow.safetensors"
    after = read(own)
    kept = {name for name, value in before.items() if value.shape == after[name].shape}
    assert "decoder.spectra.weight" in kept
    assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in kept)
    train([*arguments, "--steps", "1", "--start", str(own)])
    assert "new: [" not in capsys.readouterr().out  # its own weights are all there


def test_a_trained_codec_has_finite_weights_and_is_heard(takes: Path, capsys) -> None:
    out = out_of(takes)
    train([*flags(takes), "--steps", "12", "--alone", "0.2"])
    assert "fooled" in capsys.readouterr().out
    assert not any(value.isnan().any() for value in read(out / "toy.safetensors").values())
    codec = load(out / "toy.8bit.safetensors", out / "toy.json")
    codes = torch.zeros(1, 4, dtype=torch.long)
    samples = codec.decode(codes, torch.zeros(1, TOY.voice_tokens, dtype=torch.long))
    assert float(samples.detach().std()) > 0


def test_a_listener_learns_on_the_teacher_and_is_heard_by_the_decoder(takes: Path) -> None:
    args = build_parser().parse_args([*flags(takes), "--lr", "1e-2"])
    trainer = Trainer(args)
    given = trainer._given()
    seen = [trainer._step(*given, judging=False) for _ in range(25)]
    assert seen[-1]["heard"] < seen[0]["heard"] - 0.5
    count = len(Examples._fields) - 1
    examples = Examples(*given[:count], Plan(*given[count:-1]))
    sound, _ = trainer.model(examples)
    phones = trainer.points(examples.plan.phones)
    trainer.player.zero_grad()
    found = trainer._listen(trainer.window(examples.target), trainer.window(sound), phones)
    found["misheard"].backward()
    assert trainer.model.decoder.filters.weight.grad.abs().sum() > 0
    assert all(value.requires_grad for value in trainer.listener.parameters())
