"""The training of the encoder of voices at toy size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.codecs.source_filter.modules import SpeechCodec
from tests.training.takes import TOY, take_of, toy_coder, write_coder, write_take
from training.speech_codec.checkpoint import DECODER, halved, load, read, write
from training.speech_codec.config import save_config
from training.speech_codec.train_voices import Sessions
from training.speech_codec.train_voices import main as train

RATE = TOY.sample_rate


def voiced_take(sessions: int) -> dict[str, np.ndarray]:
    """Sessions of noise between 200 Hz and a limit that their style says as well."""
    take, rng = take_of(sessions), np.random.default_rng(0)
    kinds = rng.normal(0, 1, (4, 256))
    hz = np.fft.rfftfreq(int(take["end"][0]), 1 / RATE)
    for number, (start, end) in enumerate(zip(take["start"], take["end"], strict=True)):
        spectrum = np.fft.rfft(rng.normal(0, 3000, end - start))
        limit = 500 * 2 ** (number % 4 + 1)
        take["own"][start:end] = np.fft.irfft(spectrum * ((hz > 200) & (hz < limit)), end - start)
    take["style"] = kinds[np.arange(sessions) % 4].astype(np.float16)
    return take


def losses_of(printed: str) -> list[float]:
    """Losses of all steps of a training that logs each."""
    return [float(line.split("distance ")[1].split()[0]) for line in printed.splitlines()[:-1]]


FEW = {"SHORTEST_S": 0.5, "LONGEST_S": 1.5, "HELD_OUT_S": 1.0, "WARM_STEPS": 10}


@pytest.fixture(scope="module", autouse=True)
def short_clips() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FEW.items():
            patch.setattr(f"training.speech_codec.train_voices.{name}", value)
        yield


def flags_of(folder: Path) -> list[str]:
    """Return arguments of a training in a folder, with what it needs."""
    (folder / "takes").mkdir()
    write_take(folder / "takes" / "take_0_0000.npz", voiced_take(12))
    write_coder(folder / "coder.safetensors", toy_coder())
    places = [f"--takes={folder / 'takes'}", f"--coder={folder / 'coder.safetensors'}"]
    return [*places, f"--out={folder}", "--design=toy", "--minutes=20", "--batch=4"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return flags_of(tmp_path)


@dataclass(frozen=True)
class Trained:
    """An encoder that was trained for 60 steps."""

    file: Path
    printed: str


@pytest.fixture(scope="module")
def trained(short_clips: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, printed = tmp_path_factory.mktemp("trained"), StringIO()
    with redirect_stdout(printed):
        train([*flags_of(folder), "--steps=60", "--lr=5e-3", "--log=0"])
    return Trained(folder / "voices.safetensors", printed.getvalue())


def test_clips_are_of_their_session(flags: list[str], tmp_path: Path) -> None:
    write_take(tmp_path / "takes" / "take_0_0001.npz", take_of(9))
    sessions = Sessions(sorted((tmp_path / "takes").iterdir()), torch.device("cpu"))
    chosen = torch.arange(12, 21)
    clips, style = sessions.draw(chosen, 32, 48_000)  # longer than a session: repeated
    assert clips.shape == (32, 48_000)
    number = (clips * 32768 / 600).floor()
    assert torch.equal(number, style[:, :1].expand_as(number))
    assert len(style[:, 0].unique()) > 4


def test_voices_of_clips_come_near_their_tokens_and_the_codec_takes_them(
    trained: Trained, tmp_path: Path
) -> None:
    losses = losses_of(trained.printed)
    assert len(losses) == 60
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    for kind in ("clean", "recorded", "telephone"):
        assert f"{kind} 0." in trained.printed.splitlines()[-1]
    codec = SpeechCodec(TOY)
    state = {f"{DECODER}{name}": v for name, v in codec.decoder.state_dict().items()}
    write(halved(state), tmp_path / "toy.safetensors")
    save_config(TOY, tmp_path / "toy.json")
    files = [tmp_path / "toy.safetensors", tmp_path / "toy.json", trained.file]
    found = load(*files)
    kept = read(files[2])
    for name, value in found.voice_encoder.state_dict().items():
        assert torch.equal(value.float(), kept[f"voice_encoder.{name}"])
    with torch.inference_mode():
        _, tokens = found.voice(torch.randn(1, 20 * TOY.hop) / 10)
    assert tokens.shape == (1, TOY.voice_tokens)
    with pytest.raises(ValueError, match="without"):
        load(files[0], files[1], voices=files[0])


def test_an_encoder_is_continued(
    flags: list[str], trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, start = losses_of(trained.printed), f"--start={trained.file}"
    train([*flags, start, "--steps=8", "--lr=1e-5", "--log=0"])
    before, *steps, after = capsys.readouterr().out.splitlines()
    assert before.endswith("before")
    assert after.endswith("after 8 steps")
    assert np.mean(losses_of("\n".join((*steps, after)))) < 0.9 * np.mean(first[:10])
    earlier, found = read(trained.file), read(tmp_path / "voices.safetensors")
    assert earlier.keys() == found.keys()
    changes = [float((found[name] - value).abs().max()) for name, value in earlier.items()]
    assert 0 < max(changes) < 0.1
    train([*flags, start, "--steps=8", "--lr=1e-2", "--keep=1"])
    kept = read(tmp_path / "voices.safetensors")
    for name, value in earlier.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.allclose(kept[name], value, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match="has no encoder of voices"):
        train([*flags, f"--start={tmp_path / 'coder.safetensors'}"])


def test_without_takes_there_is_nothing_to_learn(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "takes" / "take_0_0000.npz").unlink()
    with pytest.raises(ValueError, match="no takes to learn from"):
        train(flags)
