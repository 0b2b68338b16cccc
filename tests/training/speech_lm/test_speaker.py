"""Text to speech with a language model and a codec at toy size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from benchmarks.speech_judges import prepared
from decoder.codecs.source_filter.modules import SpeechCodec
from tests.training.speech_lm.tokens import CODEBOOK, KNOWN, write_tables
from tests.training.takes import take_of, toy_coder, write_coder
from training.llama import LanguageModel, ModelConfig, checkpoint
from training.speech_codec import look_ahead, render, swaps
from training.speech_codec.checkpoint import halved, write
from training.speech_codec.clips import TABLE, Clip, read_clips
from training.speech_codec.config import DESIGNS, save_config
from training.speech_lm.judge import durations, judge, renderings
from training.speech_lm.say import main as say
from training.speech_lm.speaker import Speaker
from training.speech_lm.vocabulary import FIRST_SYMBOL, SPELLED, Symbols
from training.speech_lm.writer import Writer, prompt_of, tokens_of, tokens_of_phonemes
from training.vocabulary import END_OF_SPEECH, FIRST_CODE, START_OF_SPEECH

TOY = DESIGNS["toy"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights seldom write an end."""
    monkeypatch.setattr("training.speech_lm.writer.MAX_CODES", 40)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Random weights of both, as training leaves them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = ModelConfig(CODEBOOK, 128, 2, 2, 1, 384)
        model, codec = LanguageModel(sizes, TOY.levels), SpeechCodec(TOY)
    write(halved(checkpoint(model)), tmp_path / "lm.safetensors")
    write(halved(codec.state_dict()), tmp_path / "toy.safetensors")
    save_config(TOY, tmp_path / "toy.json")
    rows = {"af_one": [1, 2, 3, 4], "bf_one": [9, 8, 7, 6]}
    (tmp_path / "voices.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.fixture
def speaker(files: Path) -> Speaker:
    names = ("lm.safetensors", "toy.safetensors", "toy.json", "toy.safetensors")
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


def test_texts_are_written_at_once_as_alone(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.speech_lm.writer.TOP_K", 1)  # no chance
    writer = Writer(files / "lm.safetensors")
    texts = ["Hi.", "Good morning to you."]
    prompts = [prompt_of(writer.voices["af_one"], tokens_of(text)) for text in texts]
    together = writer.codes(prompts)
    assert [writer.codes([prompt])[0] for prompt in prompts] == together
    assert min(map(len, together)) > 0


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
    encoder = ["--voice-encoder", str(files / "toy.safetensors")]
    reference = ["--reference", str(files / "clip.wav")]
    say([*given, *reference, *encoder, *spelled])
    assert "said.wav" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        say([*given, *reference])
    assert "--reference needs --voice-encoder" in capsys.readouterr().err
    for wrong in (["--voice", "unknown"], ["--voice", "af_one", "--phonemes"]):
        with pytest.raises(SystemExit):
            say([*given, *wrong])
    assert "af_one, bf_one" in capsys.readouterr().err


def test_a_clip_is_not_followed_without_an_encoder_of_voices(files: Path) -> None:
    speaker = Speaker(*(files / name for name in ("lm.safetensors", "toy.safetensors", "toy.json")))
    with pytest.raises(ValueError, match="needs the weights of the encoder of voices"):
        speaker.voice_of(np.zeros(24_000, np.float32))


class Deaf:
    """In place of the listeners' models, which are not installed here: says what it was given."""

    def naturalness(self, clip: np.ndarray) -> float:
        return float(len(clip))

    def words(self, clip: np.ndarray) -> str:
        return "bad cab"

    def speaker(self, clip: np.ndarray) -> np.ndarray:
        return np.array([1.0, 0.0])


@pytest.fixture
def spoken_clips(tmp_path: Path) -> list[Clip]:
    """Clips of noise with plans and styles, as the teacher leaves them."""
    rng, rows = np.random.default_rng(0), []
    for kind, voice, count in (
        ("named", "af_one", 3),
        ("named", "bf_one", 2),
        ("mixture", "m0", 2),
    ):
        style = rng.normal(0, 1, 256).astype(np.float16)
        for number in range(count):
            name, take = f"{voice}_{number}.wav", take_of(1, 1.0)
            soundfile.write(tmp_path / name, rng.normal(0, 0.1, 24_000), TOY.sample_rate)
            phones = rng.integers(1, 20, 40).astype(np.uint8)
            curves = {kind: take[kind] for kind in ("pitch", "energy")}
            np.savez(tmp_path / f"{voice}_{number}.npz", phones=phones, style=style, **curves)
            rows.append(f"{kind}\t{voice}\t{name}\tBad cab.")
    (tmp_path / TABLE).write_text("\n".join(rows) + "\n")
    return read_clips(tmp_path)


def test_named_voices_have_their_row_and_others_follow_their_clip(
    speaker: Speaker, spoken_clips: list[Clip], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    said = renderings(speaker, toy_coder(), spoken_clips, 0)
    found = list(judge(Deaf(), TOY.sample_rate, said, out))
    assert [v.system for v in found] == ["teacher", "through", "spoken"] * 4
    assert [v.duration for v in found if v.system in ("teacher", "through")] == [1.0] * 8
    assert all(v.wrong == 0 and v.words == 2 for v in found)
    said = [v for v in found if v.system == "spoken"]
    row = speaker.voices["af_one"]
    assert said[0].duration == len(speaker.say(row, tokens_of("Bad cab."))) / 24_000
    clip, _ = soundfile.read(tmp_path / "m0_0.wav", dtype="float32")
    followed = speaker.say(speaker.voice_of(clip), tokens_of("Bad cab."))
    assert said[3].duration == len(followed) / 24_000
    assert len(list(durations(found))) == 3
    assert (out / "spoken_m0_1.wav").exists()


@pytest.mark.parametrize("clones", [False, True])
def test_plans_go_through_the_codec_in_their_own_and_in_other_voices(
    files: Path, spoken_clips: list[Clip], clones: bool
) -> None:
    write_coder(files / "coder.safetensors", toy_coder())
    voices = files / "toy.safetensors" if clones else None
    trained = render.Trained.load(
        files / "toy.safetensors", files / "toy.json", files / "coder.safetensors", voices
    )
    found = list(render.renderings(trained, spoken_clips))
    systems = ["teacher", "codec", "crossed", *(["cloned"] if clones else [])]
    assert [system for system, *_ in found] == systems * 4
    codec, coder = trained.codec, trained.coder
    named, other = spoken_clips[0], spoken_clips[3]
    assert [wanted.voice for _, _, wanted, _ in found[:3]] == ["af_one", "af_one", "bf_one"]
    clip, (_, own, crossed) = spoken_clips[1], [samples for *_, samples in found[:3]]
    for samples, voice in ((own, named), (crossed, other)):
        wanted = render.through(codec, coder, clip, render.own_voice(coder, voice))
        assert len(wanted) == 24_000
        assert np.array_equal(samples, wanted)
    assert not np.array_equal(own, crossed)
    verdicts = list(render.judge(Deaf(), trained, spoken_clips, None))
    assert len(list(render.table(verdicts))) == 1 + len(systems) * 4


def test_a_sound_takes_the_envelopes_of_another_one() -> None:
    """Noise of two colours: the excitation stays, the colour is the other's."""
    rng = np.random.default_rng(0)
    dark, bright = (
        np.convolve(rng.normal(0, 0.1, 24_000), [1.0, slope], "same").astype(np.float32)
        for slope in (0.9, -0.9)
    )
    found = swaps.swapped(swaps.Envelopes(24_000), dark, bright)
    tilt = {name: float(np.corrcoef(sound[1:], sound[:-1])[0, 1]) for name, sound in found.items()}
    assert tilt["teacher"] > 0.4
    assert tilt["codec"] < -0.4
    assert tilt["codec, teacher's envelopes"] == pytest.approx(tilt["teacher"], abs=0.1)
    assert tilt["teacher, codec's envelopes"] == pytest.approx(tilt["codec"], abs=0.1)
    assert np.allclose(swaps.swapped(swaps.Envelopes(24_000), dark, dark)["codec"], dark)


def test_frames_of_a_stress_mark_have_the_time_that_is_left_of_it() -> None:
    """Symbols of 50, 75 and 25 ms; frames of 10 ms, of which one is quiet."""
    phones = np.array([3, 3, 9, 9, 9, 4])
    loud = torch.ones(15, dtype=torch.bool)
    loud[8] = False
    found = list(look_ahead.by_time_left(torch.arange(15.0), loud, phones, [9]))
    assert [error for _, error in found] == [*range(8), *range(9, 15)]
    other = look_ahead.OTHERS
    assert [ms for ms, _ in found] == [*[other] * 5, 60, 60, 40, 20, 20, 0, 0, other, other]


def test_errors_are_large_where_a_codec_says_another_vowel(
    files: Path, spoken_clips: list[Clip]
) -> None:
    write_coder(files / "coder.safetensors", toy_coder())
    paths = [files / f"{name}" for name in ("toy.safetensors", "toy.json", "coder.safetensors")]
    trained = render.Trained.load(*paths, None)
    found = look_ahead.measure(trained, spoken_clips, [int(spoken_clips[1].plan()["phones"][10])])
    assert sum(map(len, found.values())) > 100
    assert all(np.isfinite(errors).all() for errors in found.values())


class HardOfHearing(Deaf):
    """Hears a word wrongly in clips that are not the teacher's."""

    def __init__(self, known: Sequence[np.ndarray]) -> None:
        self._known = [known_clip.tobytes() for known_clip in known]

    def words(self, clip: np.ndarray) -> str:
        return "bad cab" if clip.tobytes() in self._known else "bad cub"


def test_misheard_codes_are_spoken_in_all_other_voices(
    files: Path, spoken_clips: list[Clip]
) -> None:
    write_coder(files / "coder.safetensors", toy_coder())
    paths = [files / f"{name}" for name in ("toy.safetensors", "toy.json", "coder.safetensors")]
    trained = render.Trained.load(*paths, None)
    known = [prepared(render.read(clip.path), TOY.sample_rate) for clip in spoken_clips]
    lines = list(swaps.judge(HardOfHearing(known), trained, spoken_clips))
    voices = [line.split(":")[0] for line in lines if "|" in line]
    assert voices[:3] == ["af_one", "    bf_one", "    m0"]
    assert len(voices) == 4 * 3
    rates = {line[:28].strip(): line.split("misheard ")[1] for line in lines[-4:]}
    assert rates.pop("teacher") == "0.000 of 8 words"
    assert set(rates.values()) == {"0.500 of 8 words"}
