"""Measures of the evaluation on sounds and vectors that are known: pitch, warping, who speaks."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from benchmarks.understood import Clip
from tests.training.evaluate.sounds import RATE, glide, tone
from tests.training.speech_lm.tokens import KNOWN
from tests.training.takes import TOY
from training.evaluate import cloning, codes, phonemes, prosody, timings, voices
from training.evaluate.__main__ import build_parser
from training.evaluate.pitch import median_pitch, pitch_of
from training.evaluate.reading import PhoneReader, phones_of
from training.evaluate.systems import held_out, in_turn
from training.evaluate.warping import HOP_S, Warping, cheapest_path, features
from training.kokoro.made_up import judging
from training.kokoro.text import NUM_SYMBOLS
from training.labels import TimedWord
from training.rises import rise_at_end, steady
from training.speech_codec.coder import Reader
from training.speech_codec.config import coder_sizes


@pytest.mark.parametrize("hz", [75.0, 118.0, 240.0, 390.0])
def test_the_pitch_of_a_tone(hz: float) -> None:
    silence = np.zeros(RATE // 4)
    clip = tone(np.concatenate((silence, np.full(RATE // 2, hz), silence)))
    pitch = pitch_of(clip)
    assert len(pitch) == pytest.approx(100, abs=8)
    assert np.isnan(pitch[:15]).all()
    assert np.isnan(pitch[85:]).all()
    assert np.nanmax(np.abs(pitch[30:65] / hz - 1)) < 0.01
    assert median_pitch(clip) == pytest.approx(hz, rel=0.01)


def test_noise_and_short_clips_have_no_pitch() -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    assert np.mean(pitch_of(Clip(noise, RATE)) > 0) < 0.02
    assert np.isnan(median_pitch(Clip(noise[:100], RATE)))
    assert np.isnan(prosody.rise_of(Clip(noise[:100], RATE)))


def test_a_rise_is_that_of_the_last_voiced_part() -> None:
    flat, silence = np.full(RATE // 2, 150.0), np.zeros(RATE // 5)
    up = tone(np.concatenate((flat, glide(150, 150 * 2 ** (4 / 12), 0.3), silence)))
    down = tone(np.concatenate((glide(100, 200, 0.5), glide(200, 150, 0.4), silence)))
    assert prosody.rise_of(up) == pytest.approx(4, abs=0.6)
    assert prosody.rise_of(down) < 0


def test_a_fall_before_the_end_is_no_rise_and_one_after_a_dip_is() -> None:
    def rise(*hz: tuple[float, float, float]) -> float:
        parts = [glide(start, end, seconds)[:: RATE // 100] for start, end, seconds in hz]
        return rise_at_end(np.concatenate(parts), 0.01)

    assert rise((200, 100, 1.0)) < 0
    assert rise((200, 100, 0.2), (100, 120, 0.15)) == pytest.approx(2.6, abs=0.3)
    assert np.isnan(rise((100, 200, 0.1)))


def test_a_pitch_next_to_a_pause_is_left_out() -> None:
    found = steady(np.array([0.0, 20, 90, 100, 100, 100, 90, 60, 12]), 0.0125)
    assert np.flatnonzero(found > 0).tolist() == [4, 5]


def test_questions_count_that_the_teacher_lets_rise() -> None:
    like, unlike = prosody.rising([2.0, 0.0, 5.0, float("nan")], [3.0, 2.0, -4.0, 1.5])
    assert like.value == pytest.approx(1 / 3)
    assert like.reached is False
    assert "3 of 4" in like.note
    assert unlike.value == 1


def test_durations_are_shares_of_the_teachers() -> None:
    clips = [Clip(np.zeros(n * RATE // 10, np.float32), RATE) for n in (10, 5, 18, 30, 0)]
    shares = prosody.shares_of(iter(clips), np.ones(5))
    assert shares.tolist() == [1.0, 0.5, 1.8, 3.0, 0.0]
    found = {figure.name: figure.value for figure in prosody.lengths(shares)}
    assert found["durations outside 0.6 to 1.6"] == 4
    assert found["without an end"] == found["empty"] == 1
    lines = [(f"line {n}", "hazel") for n in range(5)]
    assert next(iter(prosody.extremes(shares, lines))).startswith("0.00")


def test_warping_finds_the_same_places_again() -> None:
    rng = np.random.default_rng(0)
    first, times = rng.normal(size=(60, 8)), rng.integers(1, 4, 60)
    warping = Warping(first, np.repeat(first, times, 0) + rng.normal(0, 0.01, (times.sum(), 8)))
    ends = np.cumsum(times)
    for place in (0, 13, 40, 59):
        middle = ends[place] - (times[place] + 1) / 2
        assert warping(place * HOP_S) == pytest.approx(middle * HOP_S, abs=HOP_S / 2)


def test_the_cheapest_path_is_that_of_all_paths() -> None:
    costs = np.array([[0.0, 5.0, 5.0], [1.0, 0.0, 5.0], [5.0, 0.0, 1.0]])
    assert cheapest_path(costs).tolist() == [[0, 0], [1, 1], [2, 1], [2, 2]]
    assert cheapest_path(np.ones((1, 3))).tolist() == [[0, 0], [0, 1], [0, 2]]


def test_borders_of_a_sound_are_found_in_a_slower_one() -> None:
    def sound(seconds: float) -> Clip:
        parts = [tone(np.full(round(seconds * RATE), hz), n) for hz, n in ((110, 3), (180, 30))]
        return Clip(np.concatenate([part.samples for part in parts]), RATE)

    warping = Warping(features(sound(0.4)), features(sound(0.6)))
    (word,) = timings.moved([TimedWord("ab", 0.1, 0.4)], warping)
    assert word.end_s == pytest.approx(0.6, abs=0.02)
    errors = timings.errors_ms([TimedWord("ab", word.start_s, word.end_s + 0.05)], [word])
    assert [round(error) for error, _ in errors] == [0, 50]


def vector(clip: np.ndarray) -> np.ndarray:
    """Return who speaks in a prepared clip: its share of positive samples as an angle."""
    angle = np.pi * float((clip > 0).mean())
    return np.array([np.cos(angle), np.sin(angle)])


def spoken(share: float) -> Clip:
    """Return a clip that `vector` recognises by the share of its positive samples."""
    samples = np.where(np.arange(RATE // 2) < share * RATE / 2, 0.5, -0.5)
    return Clip(samples.astype(np.float32), RATE)


def test_who_speaks_is_the_nearest_reference() -> None:
    shares = {"a": 0.2, "b": 0.5, "c": 0.8}
    own = voices.said_by(
        lambda text, voice: spoken(shares[voice] + len(text) / 100), ["", "x"], shares
    )
    references = voices.References(vector, own)
    lines = [("", "a"), ("", "b"), ("", "c"), ("", "c")]
    theirs = voices.tell(references, lambda _, voice: spoken(shares[voice]), lines)
    assert [one.nearest for one in theirs] == ["a", "b", "c", "c"]
    assert min(one.cosine for one in theirs) > 0.99
    ours = voices.tell(references, lambda *_: spoken(0.5), lines)
    assert [one.right for one in ours] == [False, True, False, False]
    figures = list(voices.figures(ours, theirs))
    assert [figure.reached for figure in figures] == [False, False, None, None]
    assert all(figure.reached is not False for figure in voices.figures(theirs, theirs))
    assert list(voices.worst(ours, theirs))[-1].startswith("b        1.00 (teacher 1.00)")
    assert len(references.others()) == 3


@pytest.mark.parametrize("kind", cloning.RECORDED)
def test_clips_are_sound_files_of_the_same_length(kind: str) -> None:
    clip = tone(np.full(RATE, 150.0))
    data = cloning.RECORDED[kind](clip.samples, RATE)
    samples, rate = soundfile.read(io.BytesIO(data))
    rates = {"phone": cloning.PHONE_HZ, **cloning.LOW_RATES}
    assert rate == rates.get(kind, RATE)
    assert len(samples) / rate == pytest.approx(1.0, abs=0.5)
    assert 0.1 < np.abs(samples).max() <= 1
    assert np.isfinite(samples).all()
    found = median_pitch(Clip(samples.astype(np.float32), rate))
    assert found == pytest.approx(150, rel=0.02)


def test_a_clone_has_the_pitch_of_its_clip() -> None:
    clips = {"a": tone(np.full(RATE, 150.0)), "b": tone(np.full(RATE, 100.0))}
    references = voices.References(vector, {name: [clip] for name, clip in clips.items()})
    trials = cloning.Trials(references, clips)
    said = [tone(np.full(RATE, hz)) for hz in (165.0, 180.0, 101.0)]
    found = trials.judge(iter(said), [("x", "a"), ("x", "a"), ("x", "b")])
    assert [trial.near for trial in found] == [True, False, True]
    bars = [figure.bar for figure in cloning.figures("clean", found, barred=True)]
    assert bars == [0.8, 0.75, 0.9]


def test_lines_change_voices_and_never_repeat() -> None:
    lines = in_turn(["a", "b", "c"], ["x", "y", "z"], 8)
    assert len(set(lines)) == len(lines) == 8
    assert {voice for _, voice in lines} == {"x", "y", "z"}
    assert len(held_out(5)) == 5
    many = in_turn(held_out(), [str(n) for n in range(28)], 1_000)
    assert len(set(many)) == 1_000


def test_phones_are_compared_inside_what_was_heard() -> None:
    assert phones_of("blˈɪk, ðət tˈɑː") == "blɪkðətɑ"
    assert phonemes.errors_inside("blɪk", "ðəblɪkðə") == 0
    assert phonemes.errors_inside("blɪk", "ðəbɪɡðə") == 2
    assert phonemes.errors_inside("bl", "") == 2
    found = [phonemes.Asked("blˈɪk", "hazel", heard) for heard in ("əblɪk", "əblɛk")]
    figures = list(phonemes.of_words(found, "", barred=True))
    assert figures[0].value == pytest.approx(7 / 8)
    assert figures[1].value == 0.5


def test_made_up_words_differ_and_can_be_asked_for() -> None:
    words = phonemes.judging_words(100, 0)
    assert len({word for word, _ in words}) > 90
    assert [name for _, name in words[:5]] == ["hazel", "owen", "edith", "hugh", "hazel"]
    assert [word for word, _ in words] == judging(100)
    assert phonemes.words_in_ipa("ðə kˈAk, “ʤˈO.”") == ["ðə", "kˈeɪk", "dʒˈoʊ"]


def test_written_words_are_compared_one_by_one() -> None:
    figure = phonemes.of_letters(["a b"], [["ɐ", "bˈi"]], [["ɐ", "bˈɪ"]])
    assert figure.value == 0.5
    assert figure.reached is False


def test_a_reader_gives_the_phones_of_codes(tmp_path: Path) -> None:
    reader = Reader(coder_sizes(TOY))
    with torch.no_grad():
        reader.output.weight.zero_()
        bias = reader.output.bias.zero_().view(-1, NUM_SYMBOLS + 3)
        bias[:, KNOWN["b"]] = 1.0
        bias[:, NUM_SYMBOLS:] = torch.tensor([1.0, 2.0, 0.0])
    found = PhoneReader(reader, KNOWN)
    assert found.phones([1, 2, 3]) == "b"
    assert found.phones([]) == ""
    assert set(found.pitch([1, 2])) == {300.0}
    assert np.isnan(codes.rise_of(found, []))


def test_every_command_has_its_options() -> None:
    parser = build_parser()
    given = ["--teacher", "t", "--package", "p"]
    for name in ("voices", "cloning", "prosody", "timings", "phonemes"):
        assert parser.parse_args([name, *given]).model == ""
    assert parser.parse_args(["codes", *given]).weights.name == "model.safetensors"
    assert parser.parse_args(["people", "a.wav", "b.wav"]).recordings == [
        Path("a.wav"),
        Path("b.wav"),
    ]
    assert parser.parse_args(["natural", *given, "--moonshine", "m"]).sentences is None
