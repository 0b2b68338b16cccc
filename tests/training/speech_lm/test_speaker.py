"""Text to speech with a language model and a codec at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from decoder.codecs.source_filter.modules import SpeechCodec
from tests.training.speech_lm.tokens import CODEBOOK, KNOWN, write_tables
from training.llama import LanguageModel, ModelConfig, checkpoint
from training.speech_codec.checkpoint import CODEC, halved, write
from training.speech_codec.clips import TABLE
from training.speech_codec.config import DESIGNS, save_config
from training.speech_lm.judge import durations, judge
from training.speech_lm.say import main as say
from training.speech_lm.speaker import Speaker, tokens_of, tokens_of_phonemes
from training.speech_lm.vocabulary import FIRST_SYMBOL, SPELLED, Symbols
from training.vocabulary import END_OF_SPEECH, FIRST_CODE, START_OF_SPEECH

TOY = DESIGNS["toy"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Random weights of both, as training leaves them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = ModelConfig(CODEBOOK, 128, 2, 2, 1, 384)
        model, codec = LanguageModel(sizes, TOY.levels), SpeechCodec(TOY)
    write(halved(checkpoint(model)), tmp_path / "lm.safetensors")
    state = {f"{CODEC}{name}": value for name, value in codec.state_dict().items()}
    write(halved(state), tmp_path / "toy.safetensors")
    save_config(TOY, tmp_path / "toy.json")
    rows = {"af_one": [1, 2, 3, 4], "bf_one": [9, 8, 7, 6]}
    (tmp_path / "voices.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.fixture
def speaker(files: Path) -> Speaker:
    names = ("lm.safetensors", "toy.safetensors", "toy.json")
    return Speaker(*(files / name for name in names))


def test_the_model_is_the_one_that_was_trained(speaker: Speaker, files: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LanguageModel(ModelConfig(CODEBOOK, 128, 2, 2, 1, 384), TOY.levels)
    ids = torch.tensor([[FIRST_CODE + 3, 70, 71, START_OF_SPEECH, FIRST_CODE + 5, END_OF_SPEECH]])
    with torch.no_grad():
        logits = speaker.model(ids).logits[0, :-1]
        wanted = model.eval().loss(ids, torch.arange(5), ids[0, 1:])
    got = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert float(got) == pytest.approx(float(wanted), rel=0.02)


def test_codes_only_are_said_and_the_seed_tells_which(speaker: Speaker) -> None:
    row = speaker.voices["af_one"]
    first, again, other = (speaker.codes(row, tokens_of("Hi."), seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(0 <= code < CODEBOOK for code in first)
    samples = speaker.say(row, tokens_of("Hi."))
    assert len(samples) == len(first) * TOY.hop
    assert np.abs(samples).max() <= 1


def test_phonemes_stand_behind_their_marker() -> None:
    tokens = tokens_of_phonemes("ˈab", Symbols(KNOWN))
    assert tokens[0] == SPELLED
    symbols = Symbols(KNOWN)
    assert symbols.read(np.array(tokens[1:])) == "ˈab"
    assert min(tokens[1:]) >= FIRST_SYMBOL
    assert tokens_of("“a”") == list(b'"a"')


def test_say_writes_a_sound_file(files: Path, capsys) -> None:
    flags = ["--weights", files / "lm.safetensors", "--codec", files / "toy.safetensors"]
    flags += ["--config", files / "toy.json", "--out", files / "said.wav", "--text", "bad"]
    given = list(map(str, flags))
    say([*given, "--voice", "af_one"])
    first, rate = soundfile.read(files / "said.wav")
    assert rate == TOY.sample_rate
    assert len(first) % TOY.hop == 0 < len(first)
    soundfile.write(files / "clip.wav", np.random.default_rng(0).normal(0, 0.1, 30_000), rate)
    write_tables(files / "tables")
    spelled = ["--phonemes", "--package", str(files / "tables")]
    say([*given, "--reference", str(files / "clip.wav"), *spelled])
    assert "said.wav" in capsys.readouterr().out
    for wrong in (["--voice", "nobody"], ["--voice", "af_one", "--phonemes"]):
        with pytest.raises(SystemExit):
            say([*given, *wrong])
    assert "af_one, bf_one" in capsys.readouterr().err


class Deaf:
    """In place of the listeners' models, which are not installed here: says what it was given."""

    def naturalness(self, clip: np.ndarray) -> float:
        return float(len(clip))

    def words(self, clip: np.ndarray) -> str:
        return "bad cab"

    def speaker(self, clip: np.ndarray) -> np.ndarray:
        return np.array([1.0, 0.0])


def test_named_voices_have_their_row_and_others_follow_their_clip(
    speaker: Speaker, tmp_path: Path
) -> None:
    from training.speech_codec.clips import read_clips

    rng, rows = np.random.default_rng(0), []
    for kind, voice, count in (("named", "af_one", 3), ("mixture", "mixture0", 2)):
        for number in range(count):
            name = f"{voice}_{number}.wav"
            soundfile.write(tmp_path / name, rng.normal(0, 0.1, 24_000), TOY.sample_rate)
            rows.append(f"{kind}\t{voice}\t{name}\tBad cab.")
    (tmp_path / TABLE).write_text("\n".join(rows) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    found = list(judge(Deaf(), speaker, read_clips(tmp_path), 0, out))
    assert [v.system for v in found] == ["teacher", "through", "spoken"] * 3
    assert [v.duration for v in found if v.system == "teacher"] == [1.0] * 3
    assert all(v.wrong == 0 and v.words == 2 for v in found)
    said = [v for v in found if v.system == "spoken"]
    row = speaker.voices["af_one"]
    assert said[0].duration == len(speaker.say(row, tokens_of("Bad cab."))) / 24_000
    clip, _ = soundfile.read(tmp_path / "mixture0_0.wav", dtype="float32")
    followed = speaker.say(speaker.voice_of(clip), tokens_of("Bad cab."))
    assert said[2].duration == len(followed) / 24_000
    assert len(list(durations(found))) == 2
    assert (out / "spoken_mixture0_1.wav").exists()
