"""The coder: what its reader sees, voice tokens, and its training at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.takes import (
    TOY,
    take_of,
    toy_coder,
    write_coder,
    write_take,
    write_voices,
)
from training.evaluate.reading import PhoneReader
from training.kokoro.packages import SYMBOLS
from training.kokoro.text import NUM_SYMBOLS
from training.speech_codec.coder import (
    CODER_FILE,
    Reader,
    load_coder,
    read_losses,
    symbols_of,
)
from training.speech_codec.config import DESIGNS, coder_sizes
from training.speech_codec.plans import Plan
from training.speech_codec.train_coder import main as train

SIZES = coder_sizes(TOY)


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_reader_sees_as_many_codes_ahead_as_a_decoder_and_no_more(ahead: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader = Reader(SIZES._replace(ahead=ahead)).eval()
        values = torch.randn(1, 12, len(TOY.levels))
    other, at = values.clone(), 6
    other[:, at + ahead + 1] += 1.0
    pairs = zip(reader.plan(values), reader.plan(other), strict=True)
    for first, second in pairs:
        assert first.shape[1] == 12 * SIZES.points_per_code
        changed = (first != second).any(2)[0].nonzero().flatten()
        assert int(changed.min()) == (at + 1) * SIZES.points_per_code


def test_a_style_has_the_same_voice_tokens_and_errors_change_some() -> None:
    coder = toy_coder()
    styles = torch.randn(200, 256, generator=torch.Generator().manual_seed(3))
    values, tokens = coder.voice(styles)
    assert tokens.shape == (200, TOY.voice_tokens)
    assert torch.equal(coder.voice(styles)[1], tokens)
    assert torch.equal(coder.quantizer.values(tokens), values)
    assert len(tokens.unique()) > TOY.codebook_size // 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shares = [float((coder.voice(styles, e)[1] == tokens).float().mean()) for e in (0.1, 0.4)]
        each = torch.tensor([0.0, 0.4]).repeat(100)[:, None, None]
        kept = (coder.voice(styles, each)[1] == tokens).all(1)
    assert 0.2 < shares[1] < shares[0] < 0.99
    assert kept[::2].all()
    assert not kept[1::2].all()


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a training on two plans; phones are drawn, each for 75 ms."""
    monkeypatch.setattr("training.speech_codec.train_coder.WARM_STEPS", 10)
    (tmp_path / "plans").mkdir()
    for number in range(2):
        take = take_of(sessions=40)
        phones = np.random.default_rng(number).integers(1, 9, len(take["phones"]) // 3)
        take["phones"] = phones.repeat(3).astype(np.uint8)
        write_take(tmp_path / "plans" / f"plan_{number}_0000.npz", take)
    write_voices(tmp_path / "voices.npz")
    folders = [f"--plans={tmp_path / 'plans'}", f"--voices={tmp_path / 'voices.npz'}"]
    sizes = ["--batch=8", "--crop=16", "--styles=16", "--voices-drawn=64"]
    return [*folders, f"--out={tmp_path}", "--design=toy", "--minutes=20", *sizes]


def read_shares(printed: str) -> list[float]:
    """The share of phones that are read, of every step."""
    lines = (line for line in printed.splitlines() if " right " in line and "held" not in line)
    return [float(line.split("right ")[1].split()[0]) for line in lines]


def test_phones_are_read_better_from_codes_after_training(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    train([*flags, "--steps=160", "--lr=3e-2", "--log=0"])
    printed = capsys.readouterr().out
    right = read_shares(printed)
    assert len(right) == 160
    assert np.mean(right[:10]) < 0.15
    assert np.mean(right[-10:]) > 0.3  # by chance one in 8 is right
    assert "held out: English phone" in printed
    assert "Spanish" not in printed
    coder = load_coder(tmp_path / "coder.safetensors", SIZES)
    points = 64 * SIZES.points_per_code
    phones = torch.randint(1, 9, (1, points // 8), generator=torch.Generator().manual_seed(0))
    curves = torch.zeros(3, 1, points)
    codes = coder.codes(Plan(phones.repeat_interleave(8, 1), *curves))[1]
    assert codes.shape == (1, 64)
    assert len(codes.unique()) > 3


def test_another_reader_learns_the_codes_of_a_coder_that_stays(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    own = tmp_path / "own.safetensors"
    coder = toy_coder()
    write_coder(own, coder)
    train([*flags, f"--coder={own}", "--reader-width=24", "--steps=60", "--lr=3e-2", "--log=0"])
    right = read_shares(capsys.readouterr().out)
    assert np.mean(right[-10:]) > np.mean(right[:10]) + 0.1
    assert not (tmp_path / "coder.safetensors").exists()
    known = {chr(96 + number): number for number in range(1, 9)}
    found = PhoneReader.load(tmp_path / "reader.safetensors", SIZES, known)
    assert set(found.phones(list(range(64)))) <= set(known)


def test_symbols_that_english_lacks_are_learned_without_another_code_for_english(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    own, reader = tmp_path / "own.safetensors", tmp_path / "reader.safetensors"
    coder = toy_coder()
    write_coder(own, coder)
    train([*flags, f"--coder={own}", "--steps=60", "--lr=3e-2"])
    for path in (tmp_path / "plans").iterdir():
        take = dict(np.load(path))
        half = len(take["phones"]) // 2  # sessions 20 to 39 are Spanish, with symbols of their own
        take["phones"][half:] += 8
        take["accent"][20:] = 2
        write_take(path, take)
    known = {symbol: number for number, symbol in enumerate("$abdfhijkerxɾβɣɲ")}
    (tmp_path / "package" / SYMBOLS).parent.mkdir(parents=True)
    (tmp_path / "package" / SYMBOLS).write_text(json.dumps({"model": {"vocab": known}}))
    capsys.readouterr()
    flags += [f"--coder={own}", f"--reader={reader}", f"--new-symbols={tmp_path / 'package'}"]
    train([*flags, "--steps=150", "--lr=3e-2", "--log=0"])
    printed = capsys.readouterr().out
    right = read_shares(printed)
    assert np.mean(right[-10:]) > np.mean(right[:10]) + 0.1
    assert "held out: English phone" in printed
    assert "; Spanish phone" in printed
    learned = load_coder(tmp_path / "coder.safetensors", SIZES)
    before, after = (c.content.phones.weight for c in (coder, learned))
    same = (before.half() == after.half()).all(1)
    spanish = {known[symbol] for symbol in "erxɾβɣɲ"}
    assert set(torch.arange(len(same))[~same].tolist()) == spanish
    for name, value in coder.state_dict().items():
        if name != "content.phones.weight":
            assert torch.equal(value.half().float(), learned.state_dict()[name].float()), name


def test_new_symbols_without_encoders_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--plans=plans --voices=voices.npz --out=coder --minutes=1 --new-symbols=package"
    with pytest.raises(SystemExit):
        train(flags.split())
    assert "error: --new-symbols needs --coder" in capsys.readouterr().err


def test_without_plans_there_is_nothing_to_learn(flags: list[str], tmp_path: Path) -> None:
    for path in (tmp_path / "plans").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no plans to learn from"):
        train(flags)


def test_a_symbol_counts_the_same_whatever_its_length() -> None:
    phones = torch.tensor([[5, 5, 5, 5, 7, 5], [5, 9, 9, 9, 9, 9]])
    assert symbols_of(phones).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    flat = torch.zeros(2, 6)
    plan = Plan(phones, flat, flat, flat)
    logits = torch.zeros(2, 6, NUM_SYMBOLS)
    sure = logits.scatter(2, phones[..., None], 50.0)
    short, long = sure.clone(), sure.clone()
    short[0, 4] = long[0, :4] = 0.0
    curves = torch.zeros(2, 6, 3)
    losses = [read_losses(read, curves, plan) for read in (sure, short, long)]
    assert float(losses[0].phone) < 1e-6
    assert float(losses[1].phone) == pytest.approx(float(losses[2].phone), rel=1e-5)
    assert [round(float(loss.wrong) * 5) for loss in losses] == [0, 1, 1]


def test_the_stored_weights_are_those_of_the_design() -> None:
    design = DESIGNS["source_free"]
    coder = load_coder(CODER_FILE, coder_sizes(design))
    generator = torch.Generator().manual_seed(0)
    points = 1, 20 * design.spectra_per_code
    phones = torch.randint(NUM_SYMBOLS, points, generator=generator)
    curves = (torch.randn(points, generator=generator) for _ in range(3))
    _, codes = coder.codes(Plan(phones, *curves))
    assert len(codes.unique()) > 15
    assert int(codes.max()) < design.codebook_size
