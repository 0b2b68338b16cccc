"""The language model of the natural voice, trained at toy size on a CPU."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.speech_lm.tokens import (
    CODEBOOK,
    KNOWN,
    VOICE_TOKENS,
    rows,
    write_tables,
    write_tokens,
)
from training.documents import Batch
from training.export import write_json
from training.kokoro.phonemes import table, write_table
from training.llama import LanguageModel, ModelConfig, quantise, restore
from training.speech_codec.config import DESIGNS, save_config
from training.speech_lm.speech import Speech, token_files
from training.speech_lm.texts import Texts
from training.speech_lm.train import Loader, Trainer
from training.speech_lm.train import main as train
from training.speech_lm.vocabulary import FIRST_CODE, Symbols


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("training.speech_lm.texts.HELD_OUT_LINE", 9)
    monkeypatch.setattr("training.speech_lm.train.HELD_OUT_TOKENS", 512)
    write_tables(tmp_path)
    (tmp_path / "tokens").mkdir()
    for number in range(2):
        write_tokens(tmp_path / "tokens" / f"tokens_{number}_0000.npz", seed=number)
    save_config(DESIGNS["toy"], tmp_path / "toy.json")
    places = {
        "tokens": "tokens", "phonemes": "phonemes", "package": "", "voices": "voices.npz",
        "config": "toy.json", "out": "lm",
    }  # fmt: skip
    given = [part for name, place in places.items() for part in (f"--{name}", tmp_path / place)]
    sizes = ["--layers", "1", "--dim", "128", "--tokens-per-step", "2048", "--minutes", "20"]
    return [*map(str, given), *sizes, "--no-compile", "--log", "0", "--dropout", "0"]


def losses(printed: str) -> list[float]:
    """Of every step that was logged."""
    lines = (line for line in printed.splitlines() if " loss " in line)
    return [float(line.split("loss ")[1].split()[0]) for line in lines]


def held_out(printed: str) -> list[float]:
    """The losses that decide."""
    return [float(found) for found in re.findall(r"held out: (\d+\.\d+)", printed)]


def test_it_learns_and_another_run_goes_on(flags: list[str], tmp_path: Path, capsys) -> None:
    train([*flags, "--steps", "40", "--lr", "1e-2"])
    printed = capsys.readouterr().out
    first, last = np.mean(losses(printed)[:10]), np.mean(losses(printed)[-10:])
    assert last < first - 0.5
    assert re.search(r"held out: \d.*\(lines \d", printed)
    state = load_file(tmp_path / "lm" / "lm.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float16}
    sizes = json.loads((tmp_path / "lm" / "lm.json").read_text())
    assert sizes["voice_tokens"] == VOICE_TOKENS
    assert state["model.embed_tokens.weight"].shape == (FIRST_CODE + CODEBOOK, 128)
    named = json.loads((tmp_path / "lm" / "voices.json").read_text())
    assert named == {"af_one": [0, 1, 2, 3], "am_two": [4, 5, 6, 7], "bf_one": [8, 9, 10, 11]}
    (tmp_path / "lm" / "voices.json").write_text(json.dumps(named | {"af_one": [9] * VOICE_TOKENS}))
    start = ["--start", str(tmp_path / "lm" / "lm.safetensors")]
    train([*flags, *start, "--steps", "10", "--lr", "0"])
    printed = capsys.readouterr().out
    assert np.mean(losses(printed)) < first - 0.3
    held = held_out(printed)
    assert held[0] == held[-1]  # nothing was learned at a rate of 0
    after = load_file(tmp_path / "lm" / "lm.safetensors")
    assert all(torch.allclose(state[k].float(), after[k].float(), atol=1e-3) for k in state)
    kept = json.loads((tmp_path / "lm" / "voices.json").read_text())
    assert kept["af_one"] == [9] * VOICE_TOKENS


def test_a_language_model_of_english_learns_spanish(
    flags: list[str], tmp_path: Path, capsys
) -> None:
    train([*flags, "--steps", "30", "--lr", "1e-2"])
    for number in range(4):
        write_tokens(tmp_path / "tokens" / f"tokens_{number}_0000.npz", seed=number, third=2)
    write_table(rows("e"), table(tmp_path / "phonemes", "e"))
    capsys.readouterr()
    start = ["--start", str(tmp_path / "lm" / "lm.safetensors")]
    train([*flags, *start, "--steps", "30", "--lr", "1e-2"])
    printed = capsys.readouterr().out
    spanish = [float(found) for found in re.findall(r"Spanish (\d+\.\d+)", printed)]
    assert len(spanish) == 2
    assert spanish[1] < spanish[0] - 0.3
    lines = [float(found) for found in re.findall(r"\(lines (\d+\.\d+)", printed)]
    assert lines[1] < lines[0] + 0.1


@pytest.mark.parametrize(("rate", "saves", "best"), [("0", 3, 0), ("1e-2", 4, -1)])
def test_the_best_weights_are_kept_and_it_stops_when_they_are_not_beaten(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys,
    rate: str, saves: int, best: int,
) -> None:  # fmt: skip
    """At a rate of 0 no save beats the first one; at another one all do."""
    monkeypatch.setattr("training.speech_lm.train.MEAN_EVERY", 1)
    keep = ["--save", "0", "--keep-saves", "--patience", "2", "--steps", "4"]
    train([*flags, *keep, "--lr", rate])
    printed, lm = capsys.readouterr().out, tmp_path / "lm"
    saved = sorted(lm.glob("save_*"))
    assert len(saved) == len(held_out(printed)) == saves
    names = {"lm.safetensors", "lm.json", "voices.json"}
    assert {path.name for path in saved[0].iterdir()} == names
    kept = (lm / "lm.safetensors").read_bytes()
    assert [kept == (folder / "lm.safetensors").read_bytes() for folder in saved].index(True) == (
        best % saves
    )
    assert printed.count("kept, ") == (1 if rate == "0" else saves)


def test_weights_that_are_not_finite_replace_none(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def spoiling(self: Trainer, batch: Batch, share: float) -> torch.Tensor:
        loss = train_step(self, batch, share)
        if self.step == 3:
            torch.nn.init.constant_(next(self.mean.network.parameters()), float("nan"))
        return loss

    monkeypatch.setattr(Trainer, "train_step", spoiling)
    with pytest.raises(SystemExit, match="the held-out loss is not finite at step 3"):
        train([*flags, "--save", "0", "--keep-saves", "--steps", "5"])
    lm = tmp_path / "lm"
    assert len(list(lm.glob("save_*"))) == 2
    kept = load_file(lm / "lm.safetensors")
    assert all(torch.isfinite(value).all() for value in kept.values())


def test_a_run_may_end_after_some_passes(flags: list[str], capsys) -> None:
    train([*flags, "--passes", "2"])
    assert re.search(r"done after \d+ steps, 2\.\d passes", capsys.readouterr().out)


def test_an_exported_voice_goes_on(flags: list[str], tmp_path: Path) -> None:
    train([*flags, "--steps", "2"])
    lm, voice = tmp_path / "lm", tmp_path / "voice"
    voice.mkdir()
    state = {name: value.float() for name, value in load_file(lm / "lm.safetensors").items()}
    save_file(quantise(state), voice / "model.safetensors")
    write_json(voice / "voices.json", {"voices": [{"name": "af_one", "codes": [7] * VOICE_TOKENS}]})
    start = ["--start", str(voice / "model.safetensors")]
    train([*flags, *start, "--steps", "1", "--lr", "0"])
    after = load_file(lm / "lm.safetensors")
    for name, value in state.items():
        size = value.abs().amax(-1, keepdim=True) / 127
        assert ((after[name].float() - value).abs() <= 0.6 * size + 1e-3).all(), name
    assert json.loads((lm / "voices.json").read_text())["af_one"] == [7] * VOICE_TOKENS


def test_it_waits_for_the_tokens(flags: list[str], tmp_path: Path) -> None:
    done = tmp_path / "tokens" / "finished"
    late = tmp_path / "tokens" / "tokens_7_0000.npz"
    (tmp_path / "tokens" / "tokens_0_0000.npz").rename(tmp_path / "aside.npz")
    (tmp_path / "tokens" / "tokens_1_0000.npz").unlink()

    def arrive() -> None:
        (tmp_path / "aside.npz").rename(late)
        done.touch()

    timer = threading.Timer(1.0, arrive)
    timer.start()
    train([*flags, "--after", str(done), "--steps", "1"])
    timer.join()
    assert (tmp_path / "lm" / "lm.safetensors").exists()


def test_without_tokens_a_run_ends(flags: list[str], tmp_path: Path) -> None:
    flags[flags.index("--minutes") + 1] = "0"
    with pytest.raises(SystemExit, match="did not come in time"):
        train([*flags, "--after", str(tmp_path / "never")])


def test_an_error_in_the_loader_reaches_the_loop(tmp_path: Path) -> None:
    write_tables(tmp_path)
    write_tokens(tmp_path / "tokens_0_0000.npz")
    texts = Texts.load(tmp_path / "phonemes", Symbols(KNOWN))
    speech = Speech(token_files(tmp_path), texts)
    speech.fixed.clear()
    with pytest.raises(KeyError):
        for _ in Loader(speech, texts, 2048, 0):
            pass


def test_the_kept_weights_are_those_of_the_model(flags: list[str], tmp_path: Path) -> None:
    train([*flags, "--steps", "12"])
    values = json.loads((tmp_path / "lm" / "lm.json").read_text())
    values.pop("voice_tokens")
    levels = tuple(values.pop("levels"))
    model = LanguageModel(ModelConfig(**values), levels)
    restore(model, load_file(tmp_path / "lm" / "lm.safetensors"))
    ids = torch.arange(40)[None] + FIRST_CODE
    loss = model.eval().loss(ids, torch.arange(39), ids[0, 1:])
    assert torch.isfinite(loss)
